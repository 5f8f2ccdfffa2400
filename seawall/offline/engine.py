"""Engine: the public offline API. Owns a running core in a thread; is not one.

    engine = Engine(model_path="demo")
    engine.generate("Once upon a time", {"max_new_tokens": 32})

Calls may come from several threads at once. Results are made in the caller's thread (or event
loop), so the core is never kept waiting by text.
"""

import asyncio
import contextlib
import logging
import queue
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack, overload

from tqdm.auto import tqdm

from seawall.core.config import EngineArgs, EngineConfig
from seawall.core.errors import ConfigError, EngineError, RequestError
from seawall.core.wire import (
    AbortRequest,
    CacheFlushed,
    FinishRequest,
    FlushCache,
    FromCore,
    GenerateRequest,
    OutputDelta,
)
from seawall.engine.assemble import assemble
from seawall.engine.devices import choose_device
from seawall.engine.driver import CoreThread, Mailbox
from seawall.engine.planning import make_plan, model_folder
from seawall.engine.results import ResultClaim
from seawall.engine.weights import checked_tensors
from seawall.offline.collect import ResultWriter, SampleCollector
from seawall.offline.forms import Columns, Lists
from seawall.offline.inputs import Call, GenerateOptions, InputReader
from seawall.offline.score import ScoreArgs, ScoreResult, score
from seawall.offline.scores import ScoreTotals
from seawall.text.tokenizer import Tokenizer

Result = dict[str, Any]
Collectors = dict[tuple[str, int], SampleCollector]
T = TypeVar("T")
Prompt = str | Sequence[str] | None


class Engine:
    """An engine for offline use: from a script, a notebook or an actor.

    Args:
        model_path: "demo" for the embedded model, else a Hugging Face folder or id.
        args: names and meanings as in `seawall.core.config`; `memory_budget` is the load line.

    Raises:
        ConfigError: an argument or the model folder cannot be used.
        BudgetError: the memory plan does not fit; its `table` shows why.
        ModelError: the weights cannot be read.
    """

    def __init__(self, model_path: str = "demo", **args: Unpack[EngineArgs]) -> None:
        device = choose_device(args)
        config = EngineConfig.from_args({"model_path": model_path, **args}, device.name)
        logging.getLogger("seawall").setLevel(config.log_level.upper())
        plan = make_plan(config, device_memory=device.memory_bytes)
        self.tokenizer = (
            None if config.model.skip_tokenizer_init else Tokenizer.load(plan.tokenizer_folder)
        )
        self._thread = CoreThread(lambda: assemble(config, plan))
        self._assembly = self._thread.assembly
        self._reader = InputReader(
            self.tokenizer,
            self._assembly.request_limits,
            config.logprobs_mode,
            self._assembly.random_seed,
        )

    # -- generate ----------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: Prompt = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        stream: Literal[False] = False,
        progress: bool = False,
        **options: Any,
    ) -> Any: ...

    @overload
    def generate(
        self,
        prompt: Prompt = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        stream: Literal[True],
        progress: bool = False,
        **options: Any,
    ) -> Generator[Result, None, None]: ...

    def generate(
        self,
        prompt: Prompt = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        stream: bool = False,
        progress: bool = False,
        **options: Any,
    ) -> Any:
        """Write on from prompts, score them, or both.

        Args:
            prompt: a text, or a list of them.
            sampling_params: SGLang's names; a list gives each prompt its own.
            input_ids: ids instead of text: one list, or a list of lists.
            stream: return an iterator of results as they grow (one prompt, one sample).
            progress: show a bar over a batch.
            options: see `GenerateOptions`.

        Returns:
            SGLang's dictionary (contract: `generate`); a list of them for a batch or n > 1, prompt
            by prompt. With `logprob_format="columns"` logprobs are numpy arrays (docs/results.md).

        Raises:
            RequestError: something asked cannot be honoured; nothing was run.
            QueueFullError: logprob results of other calls leave no room for this one's.
        """
        call = self._read(prompt, sampling_params, input_ids, options)
        if stream:
            return self._stream(call)
        return self._run(call, lambda samples: self._results(call, samples), progress=progress)

    def async_generate(
        self,
        prompt: Prompt = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Coroutine[Any, Any, Any]:
        """`generate` for an event loop: await it; with `stream` it gives an async iterator."""
        call = self._read(prompt, sampling_params, input_ids, options)
        return self._async_stream(call) if stream else self._async_run(call)

    def score(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | None = None,
        **args: Unpack[ScoreArgs],
    ) -> list[ScoreResult] | list[list[float]]:
        """Logprobs of texts, of continuations, or of options after one context.

        See `seawall.offline.score.score` for the forms and the result.
        """
        return score(self._reader, self._run, prompts, args)

    # -- control -----------------------------------------------------------------------------

    def abort_request(self, rid: str | None = None, *, abort_all: bool = False) -> None:
        """End a request by its id, or all; their results say so.

        Raises:
            EngineError: the engine was shut down.
        """
        self._thread.check_alive()
        if rid is not None or abort_all:
            self._thread.send(AbortRequest(rid=None if abort_all else rid))

    def flush_cache(self) -> bool:
        """Drop every cached page; False, and nothing dropped, while requests run."""
        ticket = secrets.randbits(62)
        answers: queue.SimpleQueue[list[FromCore]] = queue.SimpleQueue()
        key = f"ticket {ticket}"
        self._thread.submit(key, FlushCache(ticket=ticket), answers.put)
        [answer] = answers.get()
        self._thread.forget(key)
        return isinstance(answer, CacheFlushed) and answer.done

    def memory_report(self) -> dict[str, Any]:
        """Plan, measured bytes and pages (contract: `memory_report`)."""
        return self._thread.call(self._assembly.memory_report)

    def get_server_info(self) -> dict[str, Any]:
        """Arguments as resolved, limits, counters and the random seed."""
        return self._thread.call(self._assembly.server_info)

    # -- between requests --------------------------------------------------------------------

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give device memory back until `resume_memory_occupation`; requests are refused meanwhile.

        Args:
            tags: of "weights", "kv_cache" and "cuda_graph"; None for all. With the KV pool the
                cached prefixes go. What is released already stays so.

        Raises:
            RequestError: a tag that is not known.
            EngineError: requests run or wait.
            ModelError: the checkpoint can't be read again. In each case nothing was released.
        """
        self._thread.call(lambda: self._assembly.control.release(tags))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take released memory again, in the same sizes.

        Weights are read again from where they came from. If that was `update_weights_from_tensor`,
        requests stay refused until every weight has been given again.

        Raises:
            RequestError: a tag that is not known.
            ModelError: the checkpoint can't be read; the weights have no content.
        """
        self._thread.call(lambda: self._assembly.control.resume(tags))

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> tuple[bool, str]:
        """Replace all weights by those of another checkpoint of the same model.

        Requests that were submitted before are computed to their end with the old weights, later
        ones wait. Cached prefixes go.

        Args:
            model_path: a folder or a Hugging Face id.
            load_format: None, "auto" or "safetensors".
            abort_all_requests: end the requests that run or wait instead.
            weight_version: the new `meta_info["weight_version"]`; None leaves it as it is.

        Returns:
            True and a line that says what was done, as SGLang does; there is no False.

        Raises:
            ConfigError: config.json is another model's, or an argument can't be honoured.
            ModelError: a tensor does not fit. In each case nothing was changed.
            EngineError: the memory of the weights is released.
        """
        if load_format not in (None, "auto", "safetensors"):
            raise ConfigError(
                f"load_format: got {load_format!r}, updates are read as 'auto' or 'safetensors'"
            )
        folder = model_folder(model_path)
        self._end_requests(abort_all_requests)
        control = self._assembly.control
        self._thread.call_when_idle(lambda: control.update_from_folder(folder, weight_version))
        return True, f"weights were read from {model_path}"

    def update_weights_from_tensor(
        self,
        named_tensors: Any,
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> tuple[bool, str]:
        """Replace some weights by tensors; all of the call, or none.

        Requests that were submitted before are computed to their end with the old weights, later
        ones wait.

        Args:
            named_tensors: a mapping, or pairs, from the names of the checkpoint (q_proj, k_proj
                and v_proj, gate_proj and up_proj by themselves) to tensors of the model's shapes
                and dtype.
            load_format: None; other ways of packing are not built.
            flush_cache: drop cached prefixes; False keeps them, though they are of old weights.
            abort_all_requests: end the requests that run or wait instead.
            weight_version: the new `meta_info["weight_version"]`; None leaves it as it is.

        Returns:
            True and a line that says what was done, as SGLang does; there is no False.

        Raises:
            ModelError: a tensor does not fit; nothing was changed.
            EngineError: the memory of the weights is released.
        """
        if load_format is not None:
            raise ConfigError(f"load_format: got {load_format!r}, not built yet; leave it out")
        tensors = checked_tensors(named_tensors)
        self._end_requests(abort_all_requests)
        control = self._assembly.control
        self._thread.call_when_idle(
            lambda: control.update_from_tensors(tensors, weight_version, flush_cache=flush_cache)
        )
        return True, f"{len(tensors)} weights were taken"

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first rows of a weight as nested lists of floats.

        Raises:
            RequestError: there is none of that name, or truncate_size is negative.
            EngineError: the weights have no content at present.
        """
        if truncate_size < 0:
            raise RequestError(f"truncate_size: got {truncate_size}, the least is 0; raise it")
        return self._thread.call(lambda: self._assembly.control.values(name, truncate_size))

    def _end_requests(self, wanted: bool) -> None:
        if wanted:
            self.abort_request(abort_all=True)

    @property
    def plan_table(self) -> str:
        """The memory plan as it is printed."""
        return self._assembly.plan.table()

    def shutdown(self) -> None:
        """End all requests and give the memory back; a second call does nothing."""
        self._thread.stop()
        self._assembly.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    # -- running a call ----------------------------------------------------------------------

    def _read(self, prompt: Prompt, sampling_params: Any, input_ids: Any, options: Any) -> Call:
        known = GenerateOptions.__annotations__
        for name in options:
            if name not in known:
                raise TypeError(f"generate() got an unknown argument {name!r}")
        refusal = self._assembly.core.refusal
        if refusal is not None:
            raise EngineError(refusal)
        options = {**options, "sampling_params": sampling_params}
        call = self._reader.read(prompt, input_ids, options)
        self._assembly.results.check(call.requests)
        return call

    def _collectors(self, call: Call, claim: ResultClaim, *, streaming: bool) -> Collectors:
        return {
            (request.rid, index): SampleCollector(
                request,
                index,
                self.tokenizer if call.with_text or request.sampling.stop else None,
                streaming=streaming,
                keeps_text=call.with_text,
                totals=_totals(request) if call.totals_only else None,
                charge=claim.charge,
                room=self._assembly.texts,
            )
            for request in call.requests
            for index in range(request.sampling.n)
        }

    def _submit(self, call: Call, mailbox: Mailbox) -> None:
        """Submit all requests of a call, or none of them."""
        for at, request in enumerate(call.requests):
            try:
                self._thread.submit(request.rid, request, mailbox)
            except BaseException:
                for submitted in call.requests[:at]:
                    self._abandon(submitted.rid)
                raise

    def _abandon(self, rid: str) -> None:
        """End a request whose caller has left."""
        self._thread.forget(rid)
        self._thread.send(AbortRequest(rid=rid))

    def _grown(self, collectors: Collectors, parcel: list[FromCore]) -> Iterator[SampleCollector]:
        """The samples that a parcel adds to; what comes after a sample's end is dropped."""
        for delta in parcel:
            assert isinstance(delta, OutputDelta)
            sample = collectors[delta.rid, delta.index]
            if sample.finish is not None:
                continue
            cut = sample.take(delta)
            if cut is not None:
                self._thread.send(FinishRequest(rid=delta.rid, index=delta.index, num_output=cut))
            yield sample

    def _forget(self, call: Call, collectors: Collectors) -> None:
        """End what an interrupted caller left behind; the rest has ended."""
        for sample in collectors.values():
            sample.close()
        for request in call.requests:
            samples = (collectors[request.rid, i] for i in range(request.sampling.n))
            if any(sample.finish is None for sample in samples):
                self._abandon(request.rid)
            else:
                self._thread.forget(request.rid)

    def _run(self, call: Call, make: Callable[[Collectors], T], *, progress: bool = False) -> T:
        """Run all requests of a call to their end; returns what `make` makes of them."""
        with self._assembly.results.open(call.requests) as claim:
            collectors = self._collectors(call, claim, streaming=False)
            inbox: queue.SimpleQueue[list[FromCore]] = queue.SimpleQueue()
            left = len(collectors)
            self._submit(call, inbox.put)
            bar = tqdm(total=left, disable=not progress, unit="sample")
            try:
                while left:
                    ended = sum(s.finish is not None for s in self._grown(collectors, inbox.get()))
                    left -= ended
                    bar.update(ended)
            finally:
                bar.close()
                self._forget(call, collectors)
            return make(collectors)

    async def _async_run(self, call: Call) -> Any:
        with self._assembly.results.open(call.requests) as claim:
            collectors = self._collectors(call, claim, streaming=False)
            async for _ in self._async_samples(call, collectors):
                pass
            return self._results(call, collectors)

    async def _async_stream(self, call: Call) -> AsyncIterator[Result]:
        writer = self._writer(call)

        async def results() -> AsyncIterator[Result]:
            with self._assembly.results.open(call.requests) as claim:
                collectors = self._collectors(call, claim, streaming=True)
                async for sample in self._async_samples(call, collectors):
                    yield writer.result(sample, collectors[sample.request.rid, 0].prompt)

        return results()

    async def _async_samples(
        self, call: Call, collectors: Collectors
    ) -> AsyncIterator[SampleCollector]:
        """Each sample whenever it has grown, until all have ended."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[list[FromCore]] = asyncio.Queue()
        left = len(collectors)
        self._submit(call, lambda parcel: _post(loop, inbox, parcel))
        try:
            while left:
                for sample in self._grown(collectors, await inbox.get()):
                    left -= sample.finish is not None
                    yield sample
        finally:
            self._forget(call, collectors)

    def _stream(self, call: Call) -> Generator[Result, None, None]:
        writer = self._writer(call)
        with self._assembly.results.open(call.requests) as claim:
            collectors = self._collectors(call, claim, streaming=True)
            inbox: queue.SimpleQueue[list[FromCore]] = queue.SimpleQueue()
            left = len(collectors)
            self._submit(call, inbox.put)
            try:
                while left:
                    for sample in self._grown(collectors, inbox.get()):
                        left -= sample.finish is not None
                        yield writer.result(sample, collectors[sample.request.rid, 0].prompt)
            finally:
                self._forget(call, collectors)

    def _writer(self, call: Call) -> ResultWriter:
        if call.logprob_format == "columns":
            return ResultWriter(Columns())
        return ResultWriter(Lists(self.tokenizer if call.text_in_logprobs else None))

    def _results(self, call: Call, collectors: Collectors) -> Any:
        writer = self._writer(call)
        results = [
            writer.result(sample, collectors[sample.request.rid, 0].prompt)
            for sample in collectors.values()
        ]
        return results if call.is_batch or len(results) > 1 else results[0]


def _totals(request: GenerateRequest) -> ScoreTotals:
    """Sums of the prompt tokens that are scored: all from `start_len` on, the first one never."""
    start = request.logprob.start_len
    assert start is not None and start > 0
    return ScoreTotals(request.input_ids[start:])


def _post(
    loop: asyncio.AbstractEventLoop,
    inbox: asyncio.Queue[list[FromCore]],
    parcel: list[FromCore],
) -> None:
    """Hand a turn's deltas from the core thread to the caller's loop, if anybody still reads."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(inbox.put_nowait, parcel)
