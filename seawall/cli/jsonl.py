"""JSON lines: objects read one at a time from a file of any length, bad lines told from good ones.

Owns the limit on a line's length, and what a line that cannot be read is called. Knows nothing of
what the objects mean.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20
STANDARD = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that is not blank.

    Attributes:
        number: its place in the file, from 1.
        num_bytes: of this line and the blank ones before it.
        value: the object; empty if the line could not be read.
        error: why it could not be read.
    """

    number: int
    num_bytes: int
    value: dict[str, object]
    error: str | None = None


def open_input(path: str) -> AbstractContextManager[BinaryIO]:
    """The file, or stdin for "-"."""
    return nullcontext(sys.stdin.buffer) if path == STANDARD else Path(path).open("rb")


def input_bytes(path: str) -> int | None:
    """Size of an input, if that can be known."""
    return Path(path).stat().st_size if path != STANDARD and Path(path).is_file() else None


def read_lines(stream: BinaryIO) -> Iterator[Line]:
    """Lines, as they are asked for; nothing is read ahead."""
    number = num_bytes = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        num_bytes += len(raw)
        if len(raw) > MAX_LINE_BYTES:
            num_bytes += _skip_rest(stream, raw)
            error = f"longer than {MAX_LINE_BYTES} bytes; split it"
            yield Line(number=number, num_bytes=num_bytes, value={}, error=error)
        elif raw.strip():
            yield _line(raw, number, num_bytes)
        else:
            continue
        num_bytes = 0


def _skip_rest(stream: BinaryIO, raw: bytes) -> int:
    skipped = 0
    while raw and not raw.endswith(b"\n"):
        raw = stream.readline(MAX_LINE_BYTES)
        skipped += len(raw)
    return skipped


def _line(raw: bytes, number: int, num_bytes: int) -> Line:
    value: object = {}
    error = None
    try:
        value = json.loads(raw)
    except UnicodeDecodeError:
        error = "not UTF-8; convert the file"
    except RecursionError:
        error = "nested too deeply; give a flat JSON object"
    except ValueError as problem:
        error = f"not JSON ({problem}); write one object a line"
    if not isinstance(value, dict):
        value, error = {}, f"got {type(value).__name__}, a JSON object is needed"
    return Line(number=number, num_bytes=num_bytes, value=value, error=error)
