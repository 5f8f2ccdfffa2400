"""What changes an engine between requests: releasing its memory, and giving it other weights.

    serving --release(tags)--> refusing --resume(tags)--> serving

Releasing is refused while requests run; an update of weights is called when those that came before
it have ended (engine/driver.py). Either way nothing computed with old weights is served with new
ones: one weight version holds for all of a request, and cached prefixes go.

Owns which accounts are released, and with it whether the core serves. Called on the core thread.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from seawall.core.errors import EngineError, RequestError
from seawall.device.arena import Arena
from seawall.device.cpu import give_back_freed_memory
from seawall.device.meter import Meter
from seawall.engine.core import EngineCore
from seawall.engine.weights import NamedTensors, Weights

# Public tags and the accounts they stand for, in the order in which they are restored.
ACCOUNTS = {"weights": "weights", "kv_cache": "kv", "cuda_graph": "graphs"}


class Captures(Protocol):
    """What holds addresses into memory that is released."""

    def drop_graphs(self) -> None:
        """Forget them."""

    def capture_again(self) -> None:
        """Make them again, if there were any."""


class Control:
    """See the module's docstring."""

    def __init__(
        self, core: EngineCore, arena: Arena, weights: Weights, meter: Meter, runner: Captures
    ) -> None:
        self._core = core
        self._arena = arena
        self._weights = weights
        self._meter = meter
        self._runner = runner
        self._released: set[str] = set()

    @property
    def released(self) -> list[str]:
        """Tags whose memory is given back at present."""
        return [tag for tag in ACCOUNTS if tag in self._released]

    @property
    def weight_version(self) -> str:
        """What results are marked with."""
        return self._weights.version

    def release(self, tags: Sequence[str] | None) -> None:
        """Give the memory of these tags back (None: all); those that are released stay so.

        Raises:
            RequestError: a tag that is not known.
            EngineError: requests wait or run.
            ModelError: the weights could not be read again. In each case nothing was released.
        """
        wanted = _known(tags) - self._released
        # What has no memory (graphs, on the CPU) has nothing to wait for either.
        chosen = {tag for tag in wanted if self._arena.bytes(ACCOUNTS[tag])}
        # Requests that are held behind an update wait too.
        if not self._core.settle() or self._core.scheduler.has_work:
            counts = self._core.scheduler.counts
            raise EngineError(
                f"release_memory_occupation: {counts.running} requests run and {counts.waiting} "
                "wait; let them end, or call abort_request(abort_all=True)"
            )
        if "weights" in chosen:
            self._weights.check_reload()
        if "kv_cache" in chosen:
            self._flush()
        if chosen:
            self._runner.drop_graphs()
        for tag in chosen:
            only = self._weights.tensors if tag == "weights" else None
            self._arena.release(ACCOUNTS[tag], only)
        self._released |= chosen
        self._refuse_or_serve()
        give_back_freed_memory()

    def resume(self, tags: Sequence[str] | None) -> None:
        """Take the memory of these tags again (None: all), and read the weights again.

        Raises:
            RequestError: a tag that is not known.
            ModelError: the weights could not be read; their memory is there, without content.
        """
        chosen = _known(tags) & self._released
        for tag, account in ACCOUNTS.items():
            if tag in chosen:
                self._arena.restore(account)
                self._released.discard(tag)
        if chosen and not self._released:
            self._runner.capture_again()
        try:
            if "weights" in chosen:
                with self._meter.scope(None):
                    self._weights.reload()
        finally:
            self._refuse_or_serve()

    def update_from_folder(self, folder: Path, version: str | None) -> None:
        """Take all weights of a checkpoint folder; cached prefixes go.

        Raises:
            ConfigError, ModelError: it does not fit the model; nothing was changed.
            EngineError: the memory of the weights is released, or the cache can't be emptied;
                nothing was changed.
        """
        self._check_weights("update_weights_from_disk")
        try:
            with self._meter.scope(None):
                self._weights.update_from_folder(folder, version, self._flush)
            # Scales of the KV pool are captured by value.
            self._runner.drop_graphs()
            self._runner.capture_again()
        finally:
            self._refuse_or_serve()

    def update_from_tensors(
        self, tensors: NamedTensors, version: str | None, *, flush_cache: bool
    ) -> None:
        """Take some weights; cached prefixes go if `flush_cache` says so, their logprobs always.

        Raises:
            ModelError: a tensor does not fit; nothing was changed.
            EngineError: the memory of the weights is released, or the cache can't be emptied;
                nothing was changed.
        """
        self._check_weights("update_weights_from_tensor")
        try:
            with self._meter.scope(None):
                before = self._flush if flush_cache else self._core.leases.companions.reset
                self._weights.update_from_tensors(tensors, version, before)
        finally:
            self._refuse_or_serve()

    def values(self, name: str, count: int) -> object:
        """The first rows of a weight.

        Raises:
            RequestError: there is none of that name.
            EngineError: it has no content.
        """
        self._check_weights("get_weights_by_name")
        if self._weights.problem is not None:
            raise EngineError(self._weights.problem)
        with self._meter.scope(None):
            return self._weights.values(name, count)

    def _check_weights(self, what: str) -> None:
        if "weights" in self._released:
            raise EngineError(
                f"{what}: the memory of the weights is released; call resume_memory_occupation"
            )

    def _flush(self) -> None:
        if not self._core.leases.flush():
            raise EngineError(
                "kv: cached prefixes are held although no request runs, and would be taken for "
                "those of other weights; see violations in memory_report, make a new Engine"
            )

    def _refuse_or_serve(self) -> None:
        reason = self._weights.problem
        if self._released:
            names = " and ".join(self.released)
            reason = f"engine: the memory of {names} is released; call resume_memory_occupation"
        self._core.refuse(reason)
        self._core.scheduler.outbox.weight_version = self._weights.version


def _known(tags: Sequence[str] | None) -> set[str]:
    """The tags asked for; None, or none, stands for all.

    Raises:
        RequestError: one that is not known.
    """
    if isinstance(tags, str):
        tags = [tags]
    for tag in tags or ():
        if tag not in ACCOUNTS:
            raise RequestError(f"tags: got {tag!r}, the tags are {', '.join(ACCOUNTS)}")
    return set(tags or ACCOUNTS)
