"""Whether an engine serves requests with a grammar, and what serves them. Torch-free.

The backend is imported when the first such request comes: engines that see none don't pay for it.
"""

import importlib
import importlib.util
from pathlib import Path

from seawall.grammar.base import Backend, Vocabulary
from seawall.grammar.store import GrammarStore

DEFAULT_BACKEND = "llguidance"
_BACKENDS = {"llguidance": "seawall.grammar.llguidance:LLGuidance"}


def why_no_grammars(
    backend: str | None, tokenizer_folder: Path, eos_ids: tuple[int, ...]
) -> str | None:
    """Why requests with a grammar are refused; None if they are served."""
    if backend == "none":
        return "grammar_backend is 'none'; leave it out to have structured output"
    if importlib.util.find_spec(backend or DEFAULT_BACKEND) is None:
        return "llguidance is not installed; pip install 'seawall[grammar]'"
    if not (tokenizer_folder / "tokenizer.json").is_file():
        return "the model's folder has no tokenizer.json, which grammars need"
    if not eos_ids:
        return "the model's configuration names no end token, which grammars need"
    return None


def make_grammars(vocabulary: Vocabulary, backend: str | None, cap_bytes: int) -> GrammarStore:
    """The store of an engine that serves them."""
    module, _, name = _BACKENDS[backend or DEFAULT_BACKEND].partition(":")

    def make(of: Vocabulary) -> Backend:
        made: Backend = vars(importlib.import_module(module))[name](of)
        return made

    return GrammarStore(vocabulary, make, cap_bytes)
