"""dtypes by name, as host code writes them, to PyTorch's."""

import torch

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
}


def torch_dtype(name: str) -> torch.dtype:
    """PyTorch's dtype of that name.

    Raises:
        KeyError: not a dtype the engine stores; names are checked where they come in.
    """
    return _BY_NAME[name]
