"""Prints the size of the house at the end of a run that held the lint tests."""

from collections import Counter

import pytest
from source_tree import sources
from test_size import functions


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines: Counter[str] = Counter()
    for source in sources():
        lines[source.package] += len(source.text.splitlines())
    terminalreporter.section("lines by package")
    width = max(map(len, lines))
    for package, count in sorted(lines.items()):
        terminalreporter.write_line(f"{package:{width}} {count:6}")
    terminalreporter.write_line(f"{'all':{width}} {lines.total():6}")
    longest = sorted(
        ((size, name) for source in sources() for name, size in functions(source)), reverse=True
    )
    terminalreporter.section("ten longest functions (lines without docstring)")
    for size, name in longest[:10]:
        terminalreporter.write_line(f"{size:4} {name}")
