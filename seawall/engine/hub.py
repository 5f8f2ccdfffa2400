"""Models by Hugging Face id; what the local cache lacks is downloaded. Imported when needed."""

from pathlib import Path

from huggingface_hub import snapshot_download

from seawall.core.errors import ConfigError

_CONFIG = ("*.json", "*.jinja", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)


def download(model_id: str, *, with_weights: bool) -> Path:
    """The folder of `model_id` in the local cache, complete.

    Raises:
        ConfigError: no such model, no access, or no network and nothing cached.
    """
    patterns = [*_CONFIG, *(_WEIGHTS if with_weights else ())]
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model_path: {model_id!r} is neither a folder nor a model that can be had ({reason}); "
            "give a Hugging Face model folder or 'demo'"
        ) from None
