"""The ledger: named accounts of bytes, each with a cap.

Owns three numbers an account (now, peak, cap) and nothing else: it allocates nothing, and it
believes what it is told. The arena charges it on the device side; queues, mailboxes and caches
charge a second ledger on the host side.

    0 <= now <= cap        always: a charge that would pass the cap is refused and changes nothing
    now <= peak <= cap     peak never falls

Writers and readers may be different threads: each call is one critical section, and `snapshot`
copies every account in one.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from seawall.core.errors import BudgetError, EngineError
from seawall.core.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountUse:
    """One account at one moment, in bytes; `cap` None means that nothing bounds it."""

    now: int
    peak: int
    cap: int | None


class Ledger:
    """Bytes by account against caps.

    Args:
        caps: the cap of each account, in bytes; these are all the accounts there are.
    """

    def __init__(self, caps: Mapping[str, int]) -> None:
        for account, cap in caps.items():
            if cap < 0:
                raise EngineError(f"account {account!r}: cap {cap} is negative; the least is 0")
        self._caps: dict[str, int | None] = dict(caps)
        self._now = dict.fromkeys(caps, 0)
        self._peak = dict.fromkeys(caps, 0)
        self._open = False
        self._lock = threading.Lock()

    @classmethod
    def unbounded(cls) -> "Ledger":
        """A ledger that opens accounts as they are named and caps none: for tests and tools."""
        ledger = cls({})
        ledger._open = True
        return ledger

    def charge(self, account: str, num_bytes: int) -> None:
        """Adds `num_bytes` to the account.

        Raises:
            BudgetError: the account would pass its cap; nothing was charged. It is a ConfigError
                because long-lived memory is charged while the engine starts: the plan and the
                part that asks disagree, or the budget is too small.
            EngineError: no such account, or a negative size.
        """
        with self._lock:
            self._check(account, num_bytes)
            cap = self._caps[account]
            now = self._now[account] + num_bytes
            if cap is not None and now > cap:
                left = cap - self._now[account]
                raise BudgetError(
                    f"account {account!r}: {num_bytes} bytes ({human_bytes(num_bytes)}) asked, "
                    f"{left} of the cap of {cap} are left; raise memory_budget or lower the limit "
                    "that this account grows with"
                )
            self._now[account] = now
            self._peak[account] = max(self._peak[account], now)

    def credit(self, account: str, num_bytes: int) -> None:
        """Takes `num_bytes` back from the account.

        Raises:
            EngineError: no such account, a negative size, or more than was charged.
        """
        with self._lock:
            self._check(account, num_bytes)
            if num_bytes > self._now[account]:
                raise EngineError(
                    f"account {account!r}: {num_bytes} bytes given back, only "
                    f"{self._now[account]} are charged"
                )
            self._now[account] -= num_bytes

    def fits(self, account: str, num_bytes: int) -> bool:
        """Whether a charge of `num_bytes` would be accepted at this moment."""
        with self._lock:
            self._check(account, num_bytes)
            cap = self._caps[account]
            return cap is None or self._now[account] + num_bytes <= cap

    def set_cap(self, account: str, cap: int) -> None:
        """Moves the cap of an existing account, for the plan that follows the warm-up.

        Raises:
            EngineError: no such account, or a cap below the account's peak.
        """
        with self._lock:
            self._check(account, cap)
            if cap < self._peak[account]:
                raise EngineError(
                    f"account {account!r}: cap {cap} is below its peak of {self._peak[account]}"
                )
            self._caps[account] = cap

    def now(self, account: str) -> int:
        """Bytes charged to the account at this moment."""
        return self.use(account).now

    def peak(self, account: str) -> int:
        """The most bytes that were ever charged to the account at once."""
        return self.use(account).peak

    def cap(self, account: str) -> int | None:
        """The account's cap; None in an unbounded ledger."""
        return self.use(account).cap

    def use(self, account: str) -> AccountUse:
        """Now, peak and cap of one account, read together."""
        with self._lock:
            self._check(account, 0)
            return self._use(account)

    def snapshot(self) -> dict[str, AccountUse]:
        """Every account, read at one moment; the dict is the caller's."""
        with self._lock:
            return {account: self._use(account) for account in self._now}

    def _use(self, account: str) -> AccountUse:
        return AccountUse(now=self._now[account], peak=self._peak[account], cap=self._caps[account])

    def _check(self, account: str, num_bytes: int) -> None:
        if num_bytes < 0:
            raise EngineError(f"account {account!r}: {num_bytes} bytes; a size is at least 0")
        if account in self._now:
            return
        if not self._open:
            known = ", ".join(sorted(self._now)) or "none"
            raise EngineError(f"unknown account {account!r}; the plan has: {known}")
        self._caps[account] = None
        self._now[account] = 0
        self._peak[account] = 0
