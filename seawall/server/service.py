"""What routes have in common: the engine that serves now, its tokenizer, and how calls are run.

Owns the reader of requests, which is made anew when an engine becomes ready, since limits and
tokenizer are the engine's to say. Belongs to the event loop; long texts are tokenised in a thread.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from seawall.core.errors import RequestError
from seawall.offline.collect import ResultWriter
from seawall.offline.forms import Columns, Lists
from seawall.offline.inputs import Call, InputReader
from seawall.process.link import Link
from seawall.process.messages import Ready
from seawall.server.budget import ByteBudget, result_bytes
from seawall.server.client import EngineClient
from seawall.server.errors import HttpError, UnavailableError
from seawall.server.job import Job
from seawall.server.metrics import Metrics
from seawall.server.options import ServerOptions
from seawall.text.tokenizer import Tokenizer

T = TypeVar("T")
# What is longer, or more, is worked off beside the event loop.
_LONG_TEXT = 16384
_MANY_PROMPTS = 256
_LARGE_RESULTS = 4 << 20
_NUM_ERRORS = 20
# No token is longer on average, so a text of more characters a token can't fit: it is refused
# before it is tokenised.
_MAX_CHARS_A_TOKEN = 256


class Service:
    """See the module's docstring.

    Attributes:
        recent_errors: the last answers that were errors.
        bodies, results: what clients may hold of the front process.
        draining: set once; from then on no request is taken.
    """

    def __init__(self, options: ServerOptions, model_path: str) -> None:
        self.options = options
        self.model_name = options.served_model_name or model_path
        self.client = EngineClient()
        self.metrics = Metrics(self.model_name)
        self.bodies = ByteBudget("bodies", options.bodies_bytes)
        self.results = ByteBudget("results", options.results_bytes)
        self.tokenizer: Tokenizer | None = None
        self.tokenizer_folder: Path | None = None
        self.draining = False
        self.created = int(time.time())
        self.recent_errors: deque[dict[str, object]] = deque(maxlen=_NUM_ERRORS)
        self._reader: InputReader | None = None

    # -- Listener: the client's, with the reader made first ----------------------------------

    async def ready(self, ready: Ready, link: Link) -> None:
        """An engine serves."""
        folder = None if ready.tokenizer_folder is None else Path(ready.tokenizer_folder)
        if folder is not None and folder != self.tokenizer_folder:
            self.tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
            self.tokenizer_folder = folder
        # Requests without a seed must not draw what they drew before a restart.
        self._reader = self._reader or InputReader(
            self.tokenizer, ready.limits, ready.logprobs_mode, ready.random_seed
        )
        self._reader.limits = ready.limits
        await self.client.ready(ready, link)

    def message(self, kind: bytes, message: Any) -> None:
        """See Listener."""
        self.client.message(kind, message)

    def lost(self, reason: str) -> None:
        """See Listener."""
        self.client.lost(reason)

    @property
    def waiting(self) -> bool:
        """See Listener."""
        return self.client.waiting

    # -- for routes --------------------------------------------------------------------------

    @property
    def engine(self) -> Ready:
        """The engine that serves.

        Raises:
            UnavailableError: none does.
        """
        return self.client.check()

    @property
    def reader(self) -> InputReader:
        """Turns arguments into requests.

        Raises:
            UnavailableError: no engine serves, or the server drains.
        """
        if self.draining:
            raise UnavailableError("the server drains and takes no more requests")
        self.client.check()
        assert self._reader is not None
        return self._reader

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: the engine was told to have none.
        """
        self.client.check()
        if self.tokenizer is None:
            raise RequestError("tokenizer: skip_tokenizer_init is set; send input_ids instead")
        return self.tokenizer

    def check_model(self, name: object) -> None:
        """Refuse the name of another model than the one served; none, or "default", is fine.

        Raises:
            HttpError: 404.
        """
        if name not in (None, "", "default", self.model_name):
            raise HttpError(
                404,
                f"model: {str(name)[:80]!r} is not served here, {self.model_name!r} is",
                code="model_not_found",
                param="model",
            )

    async def read(self, texts: Sequence[str], num_prompts: int, work: Callable[[], T]) -> T:
        """Run what tokenises these texts for so many prompts, beside the event loop if it is long.

        Raises:
            RequestError: it can never fit.
        """
        engine, longest = self.engine, max(map(len, texts), default=0)
        limit = self.reader.limits.max_tokens * _MAX_CHARS_A_TOKEN
        if longest > limit:
            raise RequestError(
                f"prompt: got {longest} characters, no text of more than {limit} fits; it is "
                "longer than the model's context length"
            )
        if engine.max_queued is not None and num_prompts > engine.max_queued + engine.max_running:
            raise RequestError(
                f"prompt: got {num_prompts} prompts, {engine.max_queued + engine.max_running} may "
                "be open at a time; split the batch or raise max_queued_requests"
            )
        is_long = sum(map(len, texts)) > _LONG_TEXT or num_prompts > _MANY_PROMPTS
        return await asyncio.to_thread(work) if is_long else work()

    async def write(self, call: Call, work: Callable[[], T]) -> T:
        """Run what makes the results of a call, beside the event loop if they are large."""
        is_large = result_bytes(call.requests) > _LARGE_RESULTS
        return await asyncio.to_thread(work) if is_large else work()

    def job(self, call: Call, *, streaming: bool) -> Job:
        """A call to be run: enter it."""
        return Job(
            call, self.client, self.tokenizer, self.results, self.metrics, streaming=streaming
        )

    def writer(self, call: Call) -> ResultWriter:
        """Writes SGLang's results of a call."""
        if call.logprob_format == "columns":
            return ResultWriter(Columns())
        return ResultWriter(Lists(self.tokenizer if call.text_in_logprobs else None))

    def note_error(self, status: int, message: str) -> None:
        """Keep an error that was answered, for whoever looks at the dashboard."""
        self.recent_errors.append({"time": time.time(), "status": status, "message": message})

    def headers(self, ignored: list[str]) -> Mapping[str, str]:
        """Names of fields that were ignored, for the client's eyes."""
        if not ignored:
            return {}
        self.metrics.ignored(len(ignored))
        shown = [name for name in ignored if name.isascii() and name.isprintable()][:16]
        return {"x-seawall-ignored": ", ".join(name[:40] for name in shown)}
