"""What the engine and the process that tries grammars say to each other.

Frames on both pipes are four bytes of length and a msgpack body: a GrammarSpec one way, a Verdict
the other.
"""

import struct
from typing import IO

import msgspec

_LENGTH = struct.Struct("<I")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a grammar: why it is refused, else the bytes it and one matcher took."""

    error: str | None = None
    template_bytes: int = 0
    matcher_bytes: int = 0


def write_frame(pipe: IO[bytes], body: bytes) -> None:
    """Send one message."""
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next message; None where the other side has gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    return body if len(body) == length else None
