"""The two forms in which logprobs are handed over: SGLang's lists, and columns of numpy.

    lists      "input_token_logprobs": [[-0.5, 42, None], ...]       an object a number
    columns    "input_logprobs": float32 [n], "input_ids": int32 [n]  arrays as they were kept

Each adds its keys to a result's meta_info; docs/results.md describes them for users.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Protocol

import numpy as np

from seawall.core.params import LogprobSpec
from seawall.core.step import I32
from seawall.core.wire import GenerateRequest
from seawall.offline.scores import ScoreColumns
from seawall.text.tokenizer import Tokenizer

Entry = list[object]


class LogprobForm(Protocol):
    """One form; an object serves one call and all results of it."""

    def add_to(
        self,
        meta: dict[str, object],
        request: GenerateRequest,
        prompt: ScoreColumns,
        output: ScoreColumns,
        output_ids: Sequence[int],
    ) -> None:
        """Add a sample's logprobs as they stand; its output ends with `output_ids`."""


class Columns:
    """Arrays; those of the prompt are the ones it was kept in, shared by all its samples."""

    def add_to(
        self,
        meta: dict[str, object],
        request: GenerateRequest,
        prompt: ScoreColumns,
        output: ScoreColumns,
        output_ids: Sequence[int],
    ) -> None:
        """See LogprobForm."""
        spec, num_prompt, count = request.logprob, len(request.input_ids), len(output_ids)
        start = num_prompt if spec.start_len is None else spec.start_len
        meta["input_start"] = start
        # A sample that was cut short has scores for a part of its prompt only.
        meta["input_ids"] = request.input_ids[start : start + prompt.count]
        meta["output_ids"] = np.array(output_ids, np.int32)
        meta["input_logprobs"] = prompt.logprobs
        # Output was given room for all it could become; a copy does not hold on to that.
        meta["output_logprobs"] = output.logprobs[:count].copy()
        if spec.top_k:
            meta["input_top_ids"] = prompt.top_ids
            meta["input_top_logprobs"] = prompt.top_logprobs
            meta["output_top_ids"] = output.top_ids[:count].copy()
            meta["output_top_logprobs"] = output.top_logprobs[:count].copy()
        if spec.token_ids:
            meta["logprob_token_ids"] = np.array(spec.token_ids, np.int32)
            meta["input_token_ids_logprobs"] = prompt.token_logprobs
            meta["output_token_ids_logprobs"] = output.token_logprobs[:count].copy()


class Lists:
    """SGLang's lists. Entries are made once and shared by the results of a stream or of n > 1.

    Args:
        tokenizer: gives the text of each entry; None leaves it out.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._grown: dict[ScoreColumns, _Entries] = {}

    def add_to(
        self,
        meta: dict[str, object],
        request: GenerateRequest,
        prompt: ScoreColumns,
        output: ScoreColumns,
        output_ids: Sequence[int],
    ) -> None:
        """See LogprobForm."""
        spec, count = request.logprob, len(output_ids)
        start = len(request.input_ids) if spec.start_len is None else spec.start_len
        ours = self._entries(prompt, request)
        ours.grow(prompt, request.input_ids[start : start + prompt.count])
        theirs = self._entries(output, request)
        theirs.grow(output, np.array(output_ids, np.int32))
        meta["input_token_logprobs"] = ours.chosen[:]
        meta["output_token_logprobs"] = theirs.chosen[:count]
        if spec.top_k:
            meta["input_top_logprobs"] = ours.top[:]
            meta["output_top_logprobs"] = theirs.top[:count]
        if spec.token_ids:
            meta["input_token_ids_logprobs"] = ours.given[:]
            meta["output_token_ids_logprobs"] = theirs.given[:count]

    def _entries(self, scores: ScoreColumns, request: GenerateRequest) -> "_Entries":
        found = self._grown.get(scores)
        if found is None:
            found = _Entries(self._tokenizer, request.logprob)
            self._grown[scores] = found
        return found


class _Entries:
    """The lists of one ScoreColumns, grown as it grows."""

    def __init__(self, tokenizer: Tokenizer | None, spec: LogprobSpec) -> None:
        self.chosen: list[Entry] = []
        self.top: list[list[Entry] | None] = []
        self.given: list[list[Entry] | None] = []
        self._tokenizer = tokenizer
        self._with_top = spec.top_k > 0
        self._token_ids = list(spec.token_ids)

    def grow(self, scores: ScoreColumns, ids: I32) -> None:
        """Add the positions that came since the last time; `ids` are those of all positions."""
        start, end = len(self.chosen), min(scores.count, len(ids))
        if start >= end:
            return
        if start < scores.lead:
            # Token 0 has nothing before it: the one null there is.
            token = int(ids[0])
            self.chosen.append([None, token, self._text(token)])
            self.top.append(None)
            self.given.append(None)
            start = scores.lead
        part = slice(start, end)
        self.chosen += self._pairs(scores.logprobs[part].tolist(), ids[part].tolist())
        if self._with_top:
            rows = zip(
                scores.top_logprobs[part].tolist(), scores.top_ids[part].tolist(), strict=True
            )
            self.top += [self._pairs(logprobs, best) for logprobs, best in rows]
        if self._token_ids:
            given = scores.token_logprobs[part].tolist()
            self.given += [self._pairs(logprobs, self._token_ids) for logprobs in given]

    def _pairs(self, logprobs: list[float], ids: list[int]) -> list[Entry]:
        texts = repeat(None) if self._tokenizer is None else map(self._text, ids)
        # Lengths are not compared: `repeat` has none.
        return list(map(list, zip(logprobs, ids, texts, strict=False)))

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)
