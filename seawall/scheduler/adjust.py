"""Penalties, bias and forbidden ids as sparse changes to logits: only ids that are touched.

Repetition counts prompt and output (transformers, vLLM); frequency and presence count output
only. Made after the previous step came back, so that the newest token is counted.
"""

import numpy as np

from seawall.core.request import Request
from seawall.core.step import F32, I64, LogitAdjust
from seawall.scheduler.stop import forbidden_ids


def needs_adjust(request: Request) -> bool:
    """Whether any logit of the request's next token is changed."""
    sampling = request.sampling
    return (
        sampling.has_penalty
        or bool(sampling.logit_bias)
        or request.num_output + 1 < sampling.min_new_tokens
    )


def adjust_rows(rows: list[tuple[int, Request]], eos_ids: frozenset[int]) -> LogitAdjust | None:
    """Sparse changes for (row index, request) pairs in ascending row order; None if none."""
    parts = [(row, *_one(request, eos_ids)) for row, request in rows if needs_adjust(request)]
    if not parts:
        return None
    return LogitAdjust(
        rows=np.concatenate([np.full(len(ids), row, np.int64) for row, ids, _, _ in parts]),
        ids=np.concatenate([ids for _, ids, _, _ in parts]),
        repetition=np.concatenate([repetition for _, _, repetition, _ in parts]),
        add=np.concatenate([add for _, _, _, add in parts]),
    )


def _one(request: Request, eos_ids: frozenset[int]) -> tuple[I64, F32, F32]:
    sampling = request.sampling
    bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
    banned = np.array(forbidden_ids(request, eos_ids), np.int64)
    seen = np.empty(0, np.int64)
    if sampling.has_penalty:
        seen = np.unique(request.tokens[: request.num_tokens]).astype(np.int64)
    ids = np.union1d(np.union1d(seen, bias_ids), banned)
    repetition = np.ones(len(ids), np.float32)
    add = np.zeros(len(ids), np.float32)
    if sampling.has_penalty:
        repetition[np.searchsorted(ids, seen)] = sampling.repetition_penalty
        output = request.tokens[request.num_prompt : request.num_tokens]
        written, counts = np.unique(output, return_counts=True)
        at = np.searchsorted(ids, written)
        add[at] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    add[np.searchsorted(ids, bias_ids)] += np.array(
        [value for _, value in sampling.logit_bias], np.float32
    )
    add[np.searchsorted(ids, banned)] = -np.inf
    return ids, repetition, add
