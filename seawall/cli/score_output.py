"""The output file of `seawall score`: made anew, or taken up where a killed run left it.

Records are appended in the order of the input and flushed batch by batch, so that a process killed
at any byte leaves whole records and at most one cut one. Taking it up compares every record with
its input line, cuts the cut one off, and refuses a file that belongs to another input.
"""

import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from seawall.cli.command import CommandError
from seawall.cli.jsonl import STANDARD
from seawall.cli.score_items import ScoreItem, Shape, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What an earlier run did."""

    done: int = 0
    failed: int = 0
    num_bytes: int = 0


def check_new(path: str) -> None:
    """Refuse to write over a file.

    Raises:
        CommandError: there is one.
    """
    if path != STANDARD and Path(path).is_file():
        raise CommandError(
            f"--output {Path(path).name}: the file exists; add --resume to go on with it, or "
            "remove it"
        )


@contextmanager
def create(path: str) -> Iterator[BinaryIO]:
    """Open a new output; stdout for "-", devices as they are.

    Raises:
        CommandError: another process is writing it.
    """
    if path == STANDARD:
        yield sys.stdout.buffer
        return
    is_other = Path(path).exists() and not Path(path).is_file()
    with Path(path).open("wb" if is_other else "xb") as stream:
        if not is_other:
            _lock(stream, path)
        yield stream


@contextmanager
def reopen(path: str) -> Iterator[BinaryIO]:
    """Open the output of an earlier run; an empty one is made if there is none.

    Raises:
        CommandError: another process is writing it.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as stream:
        _lock(stream, path)
        yield stream


def take_up(stream: BinaryIO, path: str, items: Iterator[ScoreItem], shape: Shape) -> Taken:
    """Match whole records with items, cut off what follows them, and stand at the end.

    Raises:
        CommandError: a record is not that of its item; the file is left as it was.
    """
    name = Path(path).name
    done = failed = num_bytes = end = 0
    while (raw := stream.readline()).endswith(b"\n"):
        item = next(items, None)
        if item is None:
            raise CommandError(
                f"--resume: {name} has more records than the input has lines ({done}); check that "
                "they belong together"
            )
        found = _record(raw)
        why = mismatch(found, item, shape)
        if why is not None:
            raise CommandError(
                f"--resume: record {done + 1} of {name} does not match the input: {why}; check "
                "that they belong together, or write to another file"
            )
        done, end = done + 1, end + len(raw)
        num_bytes += item.num_bytes
        failed += isinstance(found, dict) and "error" in found
    stream.seek(end)
    stream.truncate()
    return Taken(done=done, failed=failed, num_bytes=num_bytes)


def check_apart(input_path: str, output_path: str) -> None:
    """Refuse to write into the input.

    Raises:
        CommandError: both are one file.
    """
    paths = (Path(input_path), Path(output_path))
    if all(path.is_file() for path in paths) and paths[0].samefile(paths[1]):
        raise CommandError("--output: is the input file itself; give another one")


def _record(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _lock(stream: BinaryIO, path: str) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return  # a file system without locks: no protection, but no reason to refuse
        raise CommandError(
            f"--output {Path(path).name}: another process is writing it; wait for it to end"
        ) from None
