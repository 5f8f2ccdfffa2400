"""The process that tries grammars: what it can't compile in time and memory never reaches the core.

    python -m seawall.grammar.worker <tokenizer file> <vocabulary size> <end ids>

In: frames with a GrammarSpec. Out: a Verdict for each. A grammar is compiled and then followed for
some steps, since some are small until their first mask. Whoever started the process kills it when
it takes too long; the limits on memory and CPU time are the kernel's, so that it never outlives
them, with or without its parent.
"""

import ctypes
import os
import resource
import sys
from pathlib import Path

import msgspec
import numpy as np

from seawall.core.grammar import GrammarSpec
from seawall.core.step import I32
from seawall.grammar.base import COMPILE_BYTES, GrammarError, Matcher, Template, Vocabulary
from seawall.grammar.frames import Verdict, read_frame, write_frame
from seawall.grammar.llguidance import LLGuidance

_STEPS = 24
_WALKS = 2
_CPU_SECONDS = 10
_FIRST = GrammarSpec(kind="json_schema", text='{"type": "object"}')
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _MallocInfo(ctypes.Structure):
    """mallinfo2 of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def try_grammar(backend: LLGuidance, spec: GrammarSpec, num_words: int) -> Verdict:
    """Compile and follow it for some steps."""
    words = np.zeros(num_words, np.int32)
    before = _bytes_in_use()
    try:
        template = backend.compile(spec)
        compiled = _bytes_in_use()
        # Kept until they have been measured.
        matchers = [_followed(template, words, walk) for walk in range(_WALKS)]
    except GrammarError as error:
        return Verdict(error=str(error))
    grown = _bytes_in_use() - compiled
    return Verdict(
        template_bytes=max(compiled - before, 0), matcher_bytes=max(grown // len(matchers), 0)
    )


def _followed(template: Template, words: I32, seed: int) -> Matcher:
    """A matcher that has moved on for some steps, by random tokens."""
    random = np.random.default_rng(seed)
    matcher = template.matcher()
    for _ in range(_STEPS):
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        if matcher.accept(int(random.choice(np.flatnonzero(bits)))):
            break
    return matcher


def main(arguments: list[str]) -> None:
    """Serve until the other side has gone."""
    file, vocab_size, eos_ids = arguments
    vocabulary = Vocabulary(
        tokenizer_file=Path(file),
        vocab_size=int(vocab_size),
        eos_token_ids=tuple(int(token) for token in eos_ids.split(",")),
    )
    source, target = sys.stdin.buffer, sys.stdout.buffer
    encode, decoder = msgspec.msgpack.encode, msgspec.msgpack.Decoder(GrammarSpec)
    try:
        backend = LLGuidance(vocabulary)
        # What is made once for all grammars is nobody's.
        try_grammar(backend, _FIRST, vocabulary.num_words)
    except GrammarError as error:
        write_frame(target, encode(Verdict(error=f"this model's tokenizer: {error}")))
        return
    write_frame(target, encode(Verdict()))
    _limit(resource.RLIMIT_AS, _status_pages(0) * _PAGE + COMPILE_BYTES)
    while (body := read_frame(source)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + _CPU_SECONDS)
        write_frame(
            target, encode(try_grammar(backend, decoder.decode(body), vocabulary.num_words))
        )


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _bytes_in_use() -> int:
    """Bytes that the C library has given out, native code's too; else the resident size."""
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return _status_pages(1) * _PAGE
    read.restype = _MallocInfo
    info = read()
    return int(info.uordblks + info.hblkhd)


def _status_pages(column: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[column])


if __name__ == "__main__":
    main(sys.argv[1:])
