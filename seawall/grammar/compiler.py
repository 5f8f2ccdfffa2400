"""Compiles grammars outside the core: tried in a process that can be killed, then made here.

A compiled grammar can't travel between processes. So each is compiled twice: first by a worker
process, under limits of time and memory, followed for some steps; what survives that is compiled
again in this process, by a thread, in native code that leaves the interpreter's lock to others.
Two threads, each with a worker of its own that is started when first needed.
"""

import contextlib
import logging
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from seawall.core.grammar import GrammarSpec
from seawall.grammar.base import (
    COMPILE_BYTES,
    COMPILE_SECONDS,
    Backend,
    GrammarError,
    Template,
    Vocabulary,
)
from seawall.grammar.frames import Verdict, read_frame, write_frame

logger = logging.getLogger("seawall.grammar")

_NUM_THREADS = 2
# A worker reads the tokenizer first; machines with every core taken start it slowly.
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What became of a grammar: a template and what it takes, or why there is none."""

    spec: GrammarSpec
    template: Template | None = None
    template_bytes: int = 0
    matcher_bytes: int = 0
    error: str | None = None


class _Worker:
    """One worker process; used by one thread."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._decoder = msgspec.msgpack.Decoder(Verdict)

    def try_grammar(self, spec: GrammarSpec, seconds: float) -> Verdict:
        """Ask the process, start it first if need be, kill it when it takes too long."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            ready = self._answer(_START_SECONDS)
            if ready.error is not None:
                self.stop()
                return ready
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, msgspec.msgpack.encode(spec))
        except OSError:
            self.stop()
            return Verdict(error="the compiling process has died; try again")
        return self._answer(seconds)

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # What was not written yet has nobody to go to.
                with contextlib.suppress(OSError):
                    pipe.close()

    def _answer(self, seconds: float) -> Verdict:
        process = self._process
        assert process is not None and process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], seconds)
        if not readable:
            self.stop()
            return Verdict(error=f"took longer than {seconds:g} s to compile; simplify it")
        body = read_frame(process.stdout)
        if body is None:
            self.stop()
            return Verdict(
                error=f"compiling it crashed, or took more than {COMPILE_BYTES >> 20} MiB; "
                "simplify it"
            )
        return self._decoder.decode(body)


class Compiler:
    """Owns the threads; `submit` from one thread, results come to `done` on theirs."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        make_backend: Callable[[Vocabulary], Backend],
        done: Callable[[Compiled], None],
    ) -> None:
        self._vocabulary = vocabulary
        self._make_backend = make_backend
        self._done = done
        self._jobs: queue.SimpleQueue[GrammarSpec | None] = queue.SimpleQueue()
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, spec: GrammarSpec) -> None:
        """Compile a grammar some time soon."""
        if not self._threads:
            for i in range(_NUM_THREADS):
                thread = threading.Thread(
                    target=self._run, name=f"seawall-grammar-{i}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._jobs.put(spec)

    def close(self) -> None:
        """End threads and processes; what is being compiled is waited for, within its limit."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(2 * COMPILE_SECONDS + 1)
        self._threads.clear()

    def _run(self) -> None:
        worker = _Worker(_command(self._vocabulary))
        try:
            while (spec := self._jobs.get()) is not None:
                self._done(self._compile(worker, spec))
        finally:
            worker.stop()

    def _compile(self, worker: _Worker, spec: GrammarSpec) -> Compiled:
        try:
            verdict = worker.try_grammar(spec, COMPILE_SECONDS)
            if verdict.error is not None:
                return Compiled(spec=spec, error=verdict.error)
            template = self._made_backend().compile(spec)
        except GrammarError as error:
            return Compiled(spec=spec, error=str(error))
        except Exception as error:  # a thread's boundary: the request gets the answer
            logger.exception("compiling a grammar failed")
            return Compiled(spec=spec, error=f"engine fault: {type(error).__name__}: {error}")
        return Compiled(
            spec=spec,
            template=template,
            template_bytes=verdict.template_bytes,
            matcher_bytes=verdict.matcher_bytes,
        )

    def _made_backend(self) -> Backend:
        """The backend of this process, made when it is first needed."""
        with self._lock:
            if self._backend is None:
                self._backend = self._make_backend(self._vocabulary)
            return self._backend


def _command(vocabulary: Vocabulary) -> list[str]:
    return [
        sys.executable,
        "-m",
        "seawall.grammar.worker",
        os.fspath(vocabulary.tokenizer_file),
        str(vocabulary.vocab_size),
        ",".join(str(token) for token in vocabulary.eos_token_ids),
    ]
