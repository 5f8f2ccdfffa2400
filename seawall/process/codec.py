"""Messages as bytes: two frames, the kind and a msgpack body. No pickle.

    [kind] [msgpack]

Arrays travel as a msgpack extension: dtype and shape, then their bytes. What is decoded is a view
of the message, so it cannot be written to. A kind is a name of the tables below; anything else is
refused, whoever sent it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from seawall.core.wire import (
    AbortRequest,
    FinishRequest,
    GenerateRequest,
    OutputDelta,
)
from seawall.process.messages import Call, CallDone, Ready, StartFailed, Stop

TO_CORE: Mapping[bytes, Any] = {
    b"generate": GenerateRequest,
    b"abort": AbortRequest,
    b"finish": FinishRequest,
    b"call": Call,
    b"stop": Stop,
}
# The deltas of one step go together: a message a step, not one a request.
FROM_CORE: Mapping[bytes, Any] = {
    b"deltas": list[OutputDelta],
    b"done": CallDone,
    b"ready": Ready,
    b"failed": StartFailed,
}

_ARRAY = 1
_KINDS_OF_NUMBERS = "biuf"


class Codec:
    """Encodes one direction and decodes the other; used by one thread at a time."""

    def __init__(self, outgoing: Mapping[bytes, Any], incoming: Mapping[bytes, Any]) -> None:
        self._kinds = {kind: outgoing[kind] for kind in outgoing}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
        self._decoders = {
            kind: msgspec.msgpack.Decoder(of, ext_hook=_decode_extension, dec_hook=_accept_array)
            for kind, of in incoming.items()
        }

    def encode(self, kind: bytes, message: object) -> list[bytes]:
        """The frames of a message."""
        assert kind in self._kinds, kind
        return [kind, self._encoder.encode(message)]

    def decode(self, frames: list[bytes]) -> tuple[bytes, Any]:
        """Kind and message.

        Raises:
            ValueError: an unknown kind, or a body that is not of it.
        """
        kind, body = frames
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise ValueError(f"message: unknown kind {kind!r}")
        return kind, decoder.decode(body)


def front_codec() -> Codec:
    """For the side that has the clients."""
    return Codec(TO_CORE, FROM_CORE)


def core_codec() -> Codec:
    """For the side that has the engine."""
    return Codec(FROM_CORE, TO_CORE)


def _encode_other(value: object) -> object:
    """What msgpack has no type for."""
    if isinstance(value, np.ndarray):
        assert value.dtype.kind in _KINDS_OF_NUMBERS, value.dtype
        head = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(2, "little") + head + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"message: cannot send a {type(value).__name__}")


def _decode_extension(code: int, data: memoryview) -> npt.NDArray[np.generic]:
    if code != _ARRAY:
        raise ValueError(f"message: unknown extension {code}")
    size = int.from_bytes(data[:2], "little")
    dtype, shape = msgspec.msgpack.decode(data[2 : 2 + size], type=tuple[str, tuple[int, ...]])
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS_OF_NUMBERS:
        raise ValueError(f"message: arrays of {dtype} are not sent")
    return np.frombuffer(data[2 + size :], kind).reshape(shape)


def _accept_array(kind: type, value: object) -> object:
    """An array was made by the extension already; its type here is only written more exactly."""
    if not isinstance(value, np.ndarray):
        raise ValueError(f"message: got {type(value).__name__} where {kind} is needed")
    return value
