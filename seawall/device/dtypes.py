"""dtypes by name, as host code writes them, to PyTorch's."""

import torch

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def torch_dtype(name: str) -> torch.dtype:
    """PyTorch's dtype of that name.

    Raises:
        KeyError: not a dtype the engine stores; names are checked where they come in.
    """
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype that the engine stores.

    Raises:
        KeyError: it stores none such.
    """
    return _NAMES[dtype]
