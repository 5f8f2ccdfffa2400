"""Samples of one prompt (n > 1): the first computes the prompt, the others share its pages.

The group holds a lock of its own on the prompt's whole pages from the moment the first sample has
computed them until the last sample has been admitted, with or without the radix cache.
"""

from seawall.cache.lease import Lease, PrefixHold
from seawall.core.request import Request


class SampleGroup:
    """Which samples of a prompt still wait, and the lock on their shared pages."""

    def __init__(self, waiting: set[int]) -> None:
        self.waiting = waiting
        self.leader = min(waiting)
        self.hold: PrefixHold | None = None


class SampleGroups:
    """All groups with waiting samples. Written by the scheduler."""

    def __init__(self) -> None:
        self._groups: dict[str, SampleGroup] = {}

    def open(self, name: str, num_samples: int) -> None:
        """Start a group whose samples all wait."""
        self._groups[name] = SampleGroup(set(range(num_samples)))

    def is_ready(self, request: Request) -> bool:
        """Whether the request may be admitted: it leads, or the prompt's pages are there."""
        group = self._group(request)
        return group is None or group.hold is not None or group.leader == request.index

    def prompt_computed(self, request: Request, lease: Lease) -> None:
        """The prompt's whole pages are in the cache: hold them for the other samples."""
        group = self._group(request)
        if group is None or group.hold is not None:
            return
        if group.waiting - {request.index}:
            group.hold = lease.hold()
        self._leave(request, group)

    def admitted(self, request: Request) -> None:
        """A sample got its seat (for good once its own lock is on the prompt's pages)."""
        group = self._group(request)
        if group is not None and (group.hold is not None or len(group.waiting) == 1):
            self._leave(request, group)

    def gone(self, request: Request) -> None:
        """A sample ended or was aborted, wherever it was."""
        group = self._group(request)
        if group is not None and request.index in group.waiting:
            self._leave(request, group)

    def drop_locks(self) -> bool:
        """Give up all shared pages; the next sample of each group computes the prompt again.

        Returns whether there were any.
        """
        held = [group for group in self._groups.values() if group.hold is not None]
        for group in held:
            assert group.hold is not None
            group.hold.release()
            group.hold = None
            group.leader = min(group.waiting)
        return bool(held)

    def _group(self, request: Request) -> SampleGroup | None:
        return None if request.group is None else self._groups.get(request.group)

    def _leave(self, request: Request, group: SampleGroup) -> None:
        assert request.group is not None
        group.waiting.discard(request.index)
        if not group.waiting:
            if group.hold is not None:
                group.hold.release()
            del self._groups[request.group]
        elif group.hold is None and group.leader == request.index:
            group.leader = min(group.waiting)
