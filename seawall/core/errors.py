"""The error tree. Every message is one line that tells the value, the limit and the fix.

SeawallError
|-- ConfigError      bad engine argument or model folder (also ValueError)
|   `-- BudgetError  the memory plan does not fit; carries the printed table
|-- ModelError       unreadable, missing, unexpected or misshapen weights (also ValueError)
|-- RequestError     a request that cannot be honoured: HTTP 400 (also ValueError)
|-- QueueFullError   the waiting queue is at its limit: HTTP 503 with Retry-After
|-- PageError        misuse of the page ledger
|-- SealedError      long-lived memory asked for after the arena was sealed
`-- EngineError      a fault of the engine while it served a request: HTTP 500
"""


class SeawallError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(SeawallError, ValueError):
    """An engine argument or a model folder that cannot be used."""


class BudgetError(ConfigError):
    """The memory plan does not fit the budget.

    Attributes:
        table: the plan as it was printed, one line per account.
    """

    def __init__(self, message: str, table: str = "") -> None:
        super().__init__(message)
        self.table = table


class ModelError(SeawallError, ValueError):
    """Weights that are unreadable, missing, unexpected or of the wrong shape."""


class RequestError(SeawallError, ValueError):
    """A request that cannot be honoured; the engine is as it was."""


class QueueFullError(SeawallError):
    """The waiting queue is at its limit; try again later."""


class PageError(SeawallError):
    """A page operation that would break single ownership."""


class SealedError(SeawallError):
    """Long-lived memory was asked for after the arena had been sealed."""


class EngineError(SeawallError):
    """The engine failed while it served a request."""
