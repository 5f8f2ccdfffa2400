"""Sizes: a file, a function or a class over its limit is listed here with the reason, or fails."""

import ast
from collections.abc import Iterator

from source_tree import Source, sources

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_CLASS_ATTRIBUTES = 12

# "seawall/part/file.py" or "seawall/part/file.py:Class.function" -> why it is better so.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
WIDE_CLASSES: dict[str, str] = {
    "seawall/core/request.py:Request": "data only: the scheduler's one mutable record of a request",
    "seawall/scheduler/scheduler.py:Scheduler": "each part that it composes is one attribute",
}

_DATA_BASES = {"Struct", "NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "Protocol"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: Source) -> Iterator[tuple[str, int]]:
    """(file:qualified name, lines without the docstring) of every function and method."""
    yield from _functions(source.tree, f"{source.file}:")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, _num_lines(child)
        if isinstance(child, Function | ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _num_lines(function: Function) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def classes(source: Source) -> Iterator[tuple[str, int]]:
    """(file:class, attributes set on self) of every class that is not plain data."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and not _is_data(node):
            yield f"{source.file}:{node.name}", len(_attributes(node))


def _is_data(node: ast.ClassDef) -> bool:
    decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return bool(decorators & {"dataclass", "dataclasses.dataclass"} or bases & _DATA_BASES)


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def _check(sizes: dict[str, int], limit: int, listed: dict[str, str]) -> None:
    over = {name: size for name, size in sizes.items() if size > limit}
    unlisted = [f"{name}: {size} > {limit}" for name, size in over.items() if name not in listed]
    assert not unlisted, "\n".join(["over the limit without a reason:", *unlisted])
    stale = sorted(set(listed) - set(over))
    assert not stale, f"listed, but within the limit or gone: {stale}"


def test_files() -> None:
    sizes = {source.file: len(source.text.splitlines()) for source in sources()}
    _check(sizes, MAX_FILE_LINES, LONG_FILES)


def test_functions() -> None:
    sizes = {name: size for source in sources() for name, size in functions(source)}
    assert sizes
    _check(sizes, MAX_FUNCTION_LINES, LONG_FUNCTIONS)


def test_class_attributes() -> None:
    sizes = {name: size for source in sources() for name, size in classes(source)}
    assert sizes
    _check(sizes, MAX_CLASS_ATTRIBUTES, WIDE_CLASSES)


def test_measures_count() -> None:
    code = 'class A:\n    def f(self):\n        """Doc.\n        """\n        self.x = 1\n'
    code += "        self.x, self.y = 1, 2\n        def g():\n            return 1\n"
    tree = ast.parse(code)
    assert dict(_functions(tree, "")) == {"A.f": 5, "A.f.g": 2}
    assert _attributes(next(n for n in tree.body if isinstance(n, ast.ClassDef))) == {"x", "y"}


def test_every_module_says_what_it_is() -> None:
    silent = [source.file for source in sources() if not ast.get_docstring(source.tree)]
    assert not silent, silent
