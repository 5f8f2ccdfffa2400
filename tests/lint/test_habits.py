"""Habits that a formatter cannot see: swallowed errors, attribute guessing, devices, words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from source_tree import REPO, Source, sources

# file -> why a handler there may catch everything
BOUNDARIES = {
    "seawall/engine/core.py": "the core's step: answers the requests it touched, serves the rest",
    "seawall/engine/driver.py": "the core's thread: the error is raised again in the caller's",
    "seawall/engine/__main__.py": "the engine process's calls: the error is sent to the caller",
    "seawall/server/client.py": "the front process: ends the request whose output can't be read",
    "seawall/grammar/compiler.py": "a compiling thread: the request gets the answer",
    "seawall/grammar/filler.py": "a mask's thread: the request gets the answer",
    "seawall/text/tokenizer.py": "tokenizers raises the bare class for every kind of bad file",
}
# file -> whose attributes it asks for by name
FOREIGN_ATTRIBUTES = {
    "seawall/__init__.py": "its own public names, imported on first use",
    "seawall/models/hf.py": "configs and modules of transformers, which differ by model",
    "seawall/models/registry.py": "the object that a 'module:object' string names",
}
CUDA_FILES = {
    "seawall/device/cuda.py",
    "seawall/runner/graphs.py",
    "seawall/parallel/collectives.py",
}

TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".sh", ".html", ".js"}
TEXT_NAMES = {"Makefile", "run", "check", "test", "bench", "LICENSE"}
SKIPPED_FOLDERS = {"shared", "build", "dist", "node_modules"}
HIDDEN_FOLDERS = {".ci", ".github"}
# Written in pieces, so that this file does not hold them itself.
FOREIGN_WORDS = re.compile(
    r"(^|[^a-z])/(work|farm|root|home|Users)/"
    r"|--(extra-)?index" + "-url|find" + "-links"
    r"|\bthis " + r"session\b|\blent " + r"(GPU|machine)"
    r"|\bTO" + r"DO\b(?! \(#\d+\))|\bFIX" + r"ME\b|\bXX" + r"X\b"
)


def _where(source: Source, node: ast.expr | ast.excepthandler | ast.stmt) -> str:
    return f"{source.file}:{node.lineno}"


def _catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(name) in {"Exception", "BaseException"} for name in names)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Cleaning up and passing the same error on swallows nothing."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _broad_handlers(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and _catches_all(node) and not _raises_again(node):
            yield _where(source, node)


def _foreign_modules(tree: ast.Module) -> set[str]:
    """Names bound by `import x`: asking a library for a name is not guessing at our own object."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.name.startswith("seawall")
    }


def _attribute_guesses(source: Source) -> Iterator[str]:
    foreign = _foreign_modules(source.tree)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in {"getattr", "hasattr", "setattr", "delattr"}:
            continue
        of = node.args[0]
        if not (isinstance(of, ast.Name) and of.id in foreign):
            yield _where(source, node)


def _cuda_uses(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        named = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
        plain = isinstance(node, ast.Import) and any(
            alias.name.startswith("torch.cuda") for alias in node.names
        )
        taken = isinstance(node, ast.ImportFrom) and (
            (node.module or "").startswith("torch.cuda")
            or (node.module == "torch" and any(alias.name == "cuda" for alias in node.names))
        )
        if isinstance(node, ast.expr | ast.stmt) and (named or plain or taken):
            yield _where(source, node)


def _unlisted(found: Iterator[tuple[Source, str]], listed: set[str]) -> list[str]:
    return [where for source, where in found if source.file not in listed]


def _text_files(folder: Path = REPO) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in HIDDEN_FOLDERS
            if not hidden and path.name not in SKIPPED_FOLDERS:
                yield from _text_files(path)
        elif path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES:
            yield path


def test_errors_are_not_swallowed() -> None:
    found = ((source, where) for source in sources() for where in _broad_handlers(source))
    assert not _unlisted(found, set(BOUNDARIES))


def test_attributes_of_our_own_objects_are_not_guessed() -> None:
    found = ((source, where) for source in sources() for where in _attribute_guesses(source))
    assert not _unlisted(found, set(FOREIGN_ATTRIBUTES))


def test_cuda_is_reached_through_the_runtime() -> None:
    found = ((source, where) for source in sources() for where in _cuda_uses(source))
    assert not _unlisted(found, CUDA_FILES)


def test_no_mutable_globals() -> None:
    wrong = [
        _where(source, node)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    assert not wrong, wrong


def test_rules_catch_what_they_name() -> None:
    code = "import torch\nfrom torch import cuda\ntry:\n    f()\nexcept (OSError, Exception):\n"
    code += "    log()\ntry:\n    f()\nexcept BaseException:\n    undo()\n    raise\n"
    code += "getattr(self, 'x')\ngetattr(torch, 'float16')\ntorch.cuda.synchronize()\n"
    example = Source(name="seawall.x", path=sources()[0].path, text=code, tree=ast.parse(code))
    file = example.file
    assert list(_broad_handlers(example)) == [f"{file}:5"]
    assert list(_attribute_guesses(example)) == [f"{file}:12"]
    assert list(_cuda_uses(example)) == [f"{file}:2", f"{file}:14"]


def test_sources_are_ascii() -> None:
    wrong = []
    for path in _text_files():
        if path.suffix == ".md" or path.name == "LICENSE":
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        wrong += [
            f"{path.relative_to(REPO)}:{number}"
            for number, line in enumerate(lines, start=1)
            if not line.isascii()
        ]
    assert not wrong, wrong


def test_words_that_do_not_belong() -> None:
    """Paths of somebody's machine, package hosts, marks of unfinished work without an issue."""
    files = list(_text_files())
    assert any(path.name == "Makefile" for path in files)
    wrong = []
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        wrong += [
            f"{path.relative_to(REPO)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(lines, start=1)
            if FOREIGN_WORDS.search(line)
        ]
    assert not wrong, "\n".join(wrong)
