"""Host bytes of text states: incremental detokenisers of samples that have begun and not ended.

Owns the promise that they stay below the host plan's line "detokenizers". A sample whose text finds
no room waits with its ids, and is made into text when there is room or at its end: it may run past
its stop string and is cut there, but the line is kept. More than the seats can have text only when
readers lag behind the core, or leave streams unread.
"""

from seawall.core.errors import BudgetError
from seawall.memory.footprint import detokenizer_bytes
from seawall.memory.ledger import Ledger

DETOKENIZERS = "detokenizers"


class TextAccount:
    """Room for text states; any thread may ask.

    Args:
        ledger: the host ledger, with the line "detokenizers".
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def take(self, num_tokens: int) -> bool:
        """Room for a text of so many tokens, until `give`; False if there is none now."""
        try:
            self._ledger.charge(DETOKENIZERS, detokenizer_bytes(1, num_tokens))
        except BudgetError:
            return False
        return True

    def give(self, num_tokens: int) -> None:
        """The text has ended."""
        self._ledger.credit(DETOKENIZERS, detokenizer_bytes(1, num_tokens))
