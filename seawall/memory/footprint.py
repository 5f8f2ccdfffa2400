"""Footprints: how many bytes each part takes, as pure functions of the configuration.

Nothing here allocates or imports torch. A part that makes tensors and the plan that accounts for
them read the same function, and fixed tables are lists of `Table`, so that what is planned and what
is allocated cannot drift apart. The footprints of the model, of attention and of the logits are in
their own modules next to this one.

Legend: R = max_running (seats), T = step_tokens, C = context_length, P = page_size,
S = pages_per_seq = ceil(C / P), b = bytes of one element.
"""

from dataclasses import dataclass

from seawall.core.errors import ConfigError
from seawall.core.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes that every footprint grows with.

    Attributes:
        max_running: seats: requests that run at the same time (R).
        step_tokens: the most packed token rows of one step (T), prefill chunk + max_running.
        context_length: the longest sequence, prompt and output together (C).
        page_size: KV slots of a page (P).
    """

    max_running: int
    step_tokens: int
    context_length: int
    page_size: int

    def __post_init__(self) -> None:
        for name, value in (
            ("max_running", self.max_running),
            ("step_tokens", self.step_tokens),
            ("context_length", self.context_length),
            ("page_size", self.page_size),
        ):
            if value < 1:
                raise ConfigError(f"{name} {value} is too small; the least is 1")

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest sequence: S = ceil(C / P)."""
        return ceil_div(self.context_length, self.page_size)


def window_pages_per_seq(limits: Limits, window: int, chunk: int) -> int:
    """Window pages that one request holds at most: min(ceil((W + chunk) / P) + 3, S).

    While a chunk is computed its own positions and the window before them are there; the pages more
    are for a first and a last page that are cut into, and for the page more than the window that a
    request keeps so that it is found in the cache again.
    """
    return min(ceil_div(window + chunk, limits.page_size) + 3, limits.pages_per_seq)


DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype given by name.

    Raises:
        ConfigError: not a dtype that the engine stores.
    """
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise ConfigError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
    return size


# Host accounts are counted as items x declared bytes; process RSS is the second witness. The
# figures below are what CPython 3.11 takes for one item, rounded up (tests measure them).
REQUEST_BYTES = 4096  # a waiting or running sample: objects, parameters, queue entries
DETOKENIZER_BYTES = 2048  # incremental text state of one sample, besides its ids
MESSAGE_BYTES = 1024  # one message in a mailbox, besides arrays of scores
RADIX_NODE_BYTES = 1024  # one node: object, two arrays, edge, dict of children, queue entry
PAGE_LEDGER_BYTES = 16  # one page in the page ledger: owner, free list, scratch
WINDOW_MAP_BYTES = 4  # one full page where there are window pages: which one is its own
WINDOW_PAGE_BYTES = 720  # one window page: ledger, map, lock, standing, two runs in the queue
COMPANION_SLOT_BYTES = 12  # a float32 logprob, an int32 id and its float32 logprob
_TOKEN_ID = 4
_LOGPROB = 4
_RANKED = 12  # an int64 id and a float32 logprob


def request_bytes(context_length: int) -> int:
    """One sample of the longest length: REQUEST_BYTES + 8 C.

    Its ids are there twice, 4 bytes each: as they came in, and in the request's own array that
    has room for the output.
    """
    return REQUEST_BYTES + 2 * _TOKEN_ID * context_length


def requests_bytes(num_requests: int, context_length: int) -> int:
    """Samples that run, or wait, all of the longest length: N (REQUEST_BYTES + 8 C)."""
    return num_requests * request_bytes(context_length)


def scores_bytes(num_positions: int, top_k: int, num_token_ids: int) -> int:
    """Logprob results kept for a sample: n (4 + 12 k + 4 m)."""
    return num_positions * (_LOGPROB + _RANKED * top_k + _LOGPROB * num_token_ids)


def results_bytes(limits: Limits, top_k: int, num_token_ids: int) -> int:
    """Results on their way out of one step, of which two are in flight: 2 (T + R)(4 + 12 k + 4 m).

    Each of the T packed rows can carry a prompt score and each of the R seats an output score.
    """
    rows = limits.step_tokens + limits.max_running
    return 2 * scores_bytes(rows, top_k, num_token_ids)


def mailbox_bytes(num_mailboxes: int, max_messages: int, message_bytes: int = MESSAGE_BYTES) -> int:
    """Bounded mailboxes, all full: boxes x messages x declared bytes."""
    return num_mailboxes * max_messages * message_bytes


def detokenizer_bytes(num_requests: int, context_length: int) -> int:
    """Text state of the samples that run: N (DETOKENIZER_BYTES + 4 C)."""
    return num_requests * (DETOKENIZER_BYTES + _TOKEN_ID * context_length)


def page_ledger_bytes(num_pages: int, num_window_pages: int = 0) -> int:
    """Owner table and free list: 16 bytes a page, histories of debug mode not counted.

    Window pages have a ledger of their own, the mapping, and their order of eviction.
    """
    num_bytes = num_pages * PAGE_LEDGER_BYTES
    if num_window_pages:
        num_bytes += num_pages * WINDOW_MAP_BYTES + num_window_pages * WINDOW_PAGE_BYTES
    return num_bytes


def tree_bytes(num_nodes: int, num_pages: int, page_size: int) -> int:
    """Prefix tree: M (RADIX_NODE_BYTES + 4 P) + N (4 P + 4), of M nodes that hold N pages.

    A node keeps the tokens and ids of its pages, and its first page's tokens once more: the edge
    under which its parent knows it.
    """
    edge = _TOKEN_ID * page_size
    return num_nodes * (RADIX_NODE_BYTES + edge) + num_pages * (edge + 4)


def radix_bytes(num_pages: int, page_size: int) -> int:
    """Prefix tree at its worst, one node a page: N (RADIX_NODE_BYTES + 8 P + 4)."""
    return tree_bytes(num_pages, num_pages, page_size)


def companion_bytes(num_pages: int, page_size: int) -> int:
    """A record beside every KV slot: 12 N P (logprob, best id, its logprob)."""
    return num_pages * page_size * COMPANION_SLOT_BYTES
