"""Builds one StepPlan, row by row, and shares a prefill budget among partial prompts."""

from collections.abc import Sequence

import numpy as np

from seawall.cache.windows import Windows
from seawall.core.request import Request
from seawall.core.step import I32, SeatParams, StepPlan


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens each partial prompt gets of this step's prefill budget, oldest first.

    The oldest gets at least half, so that it can't starve; what is left goes to the others,
    those with the least to do first, so that a short prompt doesn't wait behind a long one.
    """
    shares = [0] * len(remaining)
    if not remaining or budget <= 0:
        return shares
    shares[0] = min(remaining[0], max(budget // 2, 1))
    left = budget - shares[0]
    for i in sorted(range(1, len(remaining)), key=lambda i: (remaining[i], i)):
        shares[i] = min(remaining[i], left)
        left -= shares[i]
    shares[0] = min(remaining[0], shares[0] + left)
    return shares


class StepBuilder:
    """Collects rows of one step; used once."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._rows: list[tuple[int, int, int, int, int, bool, bool, int, int]] = []
        self._seated: set[int] = set()
        self._tokens: list[I32] = []
        self._targets: list[I32] = []
        self._tables: list[tuple[int, I32, I32]] = []
        self._window_tables: list[tuple[int, I32, I32]] = []
        self._admitted: list[SeatParams] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def has_row(self, request: Request) -> bool:
        """Whether the step computes something of a seated request already."""
        return request.seat in self._seated

    def seat(self, request: Request) -> None:
        """Announce the sampling parameters of a request that was just given a seat."""
        sampling, logprob = request.sampling, request.logprob
        self._admitted.append(
            SeatParams(
                seat=request.seat,
                temperature=0.0 if sampling.is_greedy else sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=request.seed,
                logprobs=logprob.wanted,
                logprob_top_k=logprob.top_k,
                logprob_token_ids=logprob.token_ids,
                raw_logprobs=logprob.mode == "raw",
                prompt_temperature=logprob.prompt_temperature,
            )
        )

    def add(self, request: Request, end: int, page_ids: I32) -> None:
        """Add the row [request.computed, end) and move the request's planned state forward."""
        start = request.computed
        from_last = end > request.num_tokens
        samples = end == request.num_planned and request.may_sample
        score_start = max(start, request.scored)
        score_end = max(min(end, request.last_scored_position), score_start)
        self._seated.add(request.seat)
        self._rows.append(
            (
                request.seat,
                request.epoch,
                start,
                min(max(request.write_from, start), end),
                end - start,
                from_last,
                samples,
                score_start,
                score_end,
            )
        )
        self._tokens.append(_ZERO if from_last else request.tokens[start:end])
        if score_end > score_start:
            self._targets.append(request.tokens[score_start + 1 : score_end + 1])
            request.scored = score_end
        if request.table_columns < len(page_ids):
            fresh = page_ids[request.table_columns :].copy()
            columns = np.arange(request.table_columns, len(page_ids), dtype=np.int32)
            self._tables.append((request.seat, columns, fresh))
            has_window, pages = self._windows.table(fresh)
            if len(pages):
                self._window_tables.append((request.seat, columns[has_window], pages))
            request.table_columns = len(page_ids)
        self.num_tokens += end - start
        request.computed = end
        request.outstanding += samples

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """Add decoding requests whose pages and page tables stay as they are: most rows there are.

        The same as `add` for each, in a tenth of the time.
        """
        samples = [r.num_tokens + r.outstanding - r.num_prompt < r.max_new_tokens for r in requests]
        self._rows += [
            (
                r.seat,
                r.epoch,
                r.computed,
                r.computed + (r.write_from > r.computed),
                1,
                r.outstanding > 0,
                draws,
                r.computed,
                r.computed,
            )
            for r, draws in zip(requests, samples, strict=True)
        ]
        tokens = [0 if r.outstanding else r.tokens[r.computed] for r in requests]
        self._tokens.append(np.array(tokens, np.int32))
        self._seated.update([r.seat for r in requests])
        self.num_tokens += len(requests)
        for request, draws in zip(requests, samples, strict=True):
            request.computed += 1
            request.outstanding += draws

    def build(self, step: int) -> StepPlan:
        """The finished plan."""
        columns = list(zip(*self._rows, strict=True)) if self._rows else [()] * 9
        return StepPlan(
            step=step,
            seats=np.array(columns[0], np.int32),
            epochs=np.array(columns[1], np.int64),
            starts=np.array(columns[2], np.int32),
            write_starts=np.array(columns[3], np.int32),
            lengths=np.array(columns[4], np.int32),
            token_ids=_packed(self._tokens),
            from_last=np.array(columns[5], np.bool_),
            samples=np.array(columns[6], np.bool_),
            score_starts=np.array(columns[7], np.int32),
            score_ends=np.array(columns[8], np.int32),
            score_targets=_packed(self._targets),
            table_seats=_seats(self._tables),
            table_columns=_packed([columns for _, columns, _ in self._tables]),
            table_pages=_packed([pages for _, _, pages in self._tables]),
            window_seats=_seats(self._window_tables),
            window_columns=_packed([columns for _, columns, _ in self._window_tables]),
            window_pages=_packed([pages for _, _, pages in self._window_tables]),
            admitted=tuple(self._admitted),
        )


_ZERO = np.zeros(1, np.int32)


def _seats(tables: list[tuple[int, I32, I32]]) -> I32:
    return _packed([np.full(len(pages), seat, np.int32) for seat, _, pages in tables])


def _packed(parts: list[I32]) -> I32:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
