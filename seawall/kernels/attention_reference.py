"""The slow twin of paged attention: one row, one head and one query at a time, in float32.

The specification in code, for tests. It reads the pool after the step's keys and values were
stored and knows nothing of chunks, blocks or layouts beyond [K, S, D].

Legend: T = packed tokens, H = query heads, K = kv heads, D = head_dim, S = slots.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def slots_of(
    pages: npt.NDArray[np.int32], begin: int, end: int, page_size: int
) -> npt.NDArray[np.int64]:
    """Slots of the positions [begin, end) of a sequence that lies in `pages`."""
    return np.array(
        [int(pages[p // page_size]) * page_size + p % page_size for p in range(begin, end)],
        dtype=np.int64,
    )


def reference_attention(
    q_THD: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    rows: list[tuple[npt.NDArray[np.int32], int, int]],
    page_size: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of packed rows, each (page ids, start, length). Gives float32 [T, H, D].

    Args:
        q_THD: queries.
        keys_KSD: keys of the pool.
        values_KSD: values of the pool.
        rows: the packed rows.
        page_size: slots of a page.
        scale: factor on the scores.
        window: a query at position p sees [max(0, p - window + 1), p]; None for [0, p].
        softcap: scores become softcap * tanh(score / softcap).
        sinks_H: a score for each head that takes its share and adds nothing.
    """
    num_heads = q_THD.shape[1]
    group = num_heads // keys_KSD.shape[0]
    out = torch.zeros(q_THD.shape, dtype=torch.float32)
    token = 0
    for pages, start, length in rows:
        for position in range(start, start + length):
            first = 0 if window is None else max(0, position - window + 1)
            seen = torch.from_numpy(slots_of(pages, first, position + 1, page_size))
            for head in range(num_heads):
                keys = keys_KSD[head // group].index_select(0, seen).float()
                values = values_KSD[head // group].index_select(0, seen).float()
                scores = keys @ q_THD[token, head].float() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks_H is not None:
                    scores = torch.cat((scores, sinks_H[head].float().view(1)))
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                out[token, head] = weights @ values
            token += 1
    return out
