"""The package as text: its files, syntax trees and imports, read once for all lint tests."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import seawall

PACKAGE = Path(seawall.__file__).parent
REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One module: `name` is dotted and starts with the package's name."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def file(self) -> str:
        """The path in the repository, as messages print it."""
        return self.path.relative_to(PACKAGE.parent).as_posix()

    @property
    def package(self) -> str:
        """The part of the house it belongs to: a folder, or a module at the top."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One name that a module depends on, wherever in the file that is written."""

    target: str
    line: int


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Source(name=name, path=path, text=text, tree=ast.parse(text)))
    return tuple(found)


@functools.cache
def module_names() -> frozenset[str]:
    """Dotted names of all modules and packages."""
    return frozenset(source.name for source in sources())


def imports(source: Source) -> Iterator[Import]:
    """Imports at the top, inside functions, under TYPE_CHECKING, and by registry string.

    A string counts if it is exactly "seawall.some.module" or "seawall.some.module:object" and the
    module exists: that is how optional parts are named without importing them.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(target=alias.name, line=node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.file}:{node.lineno}: relative import"
            yield from _from_targets(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if module.startswith("seawall.") and module in module_names():
                yield Import(target=module, line=node.lineno)


def _from_targets(node: ast.ImportFrom) -> Iterator[Import]:
    """`from a import b` depends on a.b where that is a module, else on a."""
    assert node.module is not None
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        target = inner if inner in module_names() else node.module
        yield Import(target=target, line=node.lineno)
