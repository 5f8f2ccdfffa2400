"""From deltas to results: text, stop strings, and SGLang's result dictionary.

One collector a sample; whoever receives the deltas is its only writer. Without stop strings and
without streaming, text is decoded once at the end.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from seawall.core.step import F32, I64, Scores
from seawall.core.wire import FinishReason, GenerateRequest, OutputDelta
from seawall.text.detokenizer import IncrementalDetokenizer
from seawall.text.tokenizer import Tokenizer

Entry = list[object]
_LEAST = float(np.finfo(np.float32).min)


@dataclass(slots=True)
class ScoreList:
    """Scores that arrive in pieces."""

    parts: list[Scores] = field(default_factory=list)

    def add(self, scores: Scores | None) -> None:
        """Append a piece, if there is one."""
        if scores is not None:
            self.parts.append(scores)

    @property
    def logprobs(self) -> F32:
        """float32 [n]."""
        return _joined([p.logprobs for p in self.parts], np.float32)

    @property
    def top(self) -> list[tuple[I64, F32]]:
        """Ids and logprobs of the best, one pair a position."""
        return [pair for p in self.parts for pair in zip(p.top_ids, p.top_logprobs, strict=True)]

    @property
    def given(self) -> list[F32]:
        """Logprobs of the ids that were asked, one array a position."""
        return [row for p in self.parts for row in p.token_logprobs]


class SampleCollector:
    """One sample's output so far."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        tokenizer: Tokenizer | None,
        *,
        streaming: bool,
    ) -> None:
        self.request = request
        self.index = index
        self.ids: list[int] = []
        self.text = ""
        self.output = ScoreList()
        self.prompt = ScoreList()
        self.finish: dict[str, object] | None = None
        self.last: OutputDelta | None = None
        self.seconds = 0.0
        self._tokenizer = tokenizer
        self._started = time.perf_counter()
        sampling = request.sampling
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                stop=sampling.stop,
                no_stop_trim=sampling.no_stop_trim,
                min_tokens=sampling.min_new_tokens,
            )
            if tokenizer is not None and (streaming or sampling.stop)
            else None
        )

    def take(self, delta: OutputDelta) -> int | None:
        """Take a delta; returns the output length if a stop string has just ended the sample."""
        if self.finish is not None:
            return None
        self.last = delta
        self.ids.extend(delta.output_ids)
        self.prompt.add(delta.prompt_scores)
        self.output.add(delta.output_scores)
        cut = self._take_text(delta)
        if cut is not None:
            return cut
        if delta.finish is not None:
            self._end(_finish_dict(delta.finish))
        return None

    def _take_text(self, delta: OutputDelta) -> int | None:
        if self._detokenizer is None:
            return None
        finish = delta.finish
        by_id = finish is not None and finish.matched is not None
        drop = by_id and not self.request.sampling.no_stop_trim
        self.text += self._detokenizer.push(delta.output_ids[:-1] if drop else delta.output_ids)
        match = self._detokenizer.match
        if match is not None:
            del self.ids[match.num_tokens :]
            self._end({"type": "stop", "matched": match.matched})
            return match.num_tokens
        if finish is not None:
            self.text += self._detokenizer.finish()
        return None

    def _end(self, finish: dict[str, object]) -> None:
        self.finish = finish
        self.seconds = time.perf_counter() - self._started
        if self._detokenizer is None and self._tokenizer is not None:
            trim = finish["type"] == "stop" and not self.request.sampling.no_stop_trim
            self.text = self._tokenizer.decode(
                self.ids[:-1] if trim else self.ids,
                skip_special_tokens=self.request.sampling.skip_special_tokens,
                spaces_between_special_tokens=self.request.sampling.spaces_between_special_tokens,
            )


class ResultWriter:
    """Writes SGLang's result dictionary of a sample."""

    def __init__(self, tokenizer: Tokenizer | None, *, text_in_logprobs: bool) -> None:
        self._tokenizer = tokenizer if text_in_logprobs else None

    def result(self, sample: SampleCollector, prompt: ScoreList) -> dict[str, object]:
        """The dictionary as it stands; `prompt` are the scores of the request's first sample."""
        request = sample.request
        last = sample.last
        meta: dict[str, object] = {
            "id": request.rid if request.sampling.n == 1 else f"{request.rid}_{sample.index}",
            "finish_reason": sample.finish,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(sample.ids),
            "cached_tokens": 0 if last is None else last.cached_tokens,
            "num_retractions": 0 if last is None else last.num_retractions,
            "weight_version": "default",
            "e2e_latency": sample.seconds,
        }
        if request.logprob.wanted:
            self._add_logprobs(meta, sample, prompt)
        return {"text": sample.text, "output_ids": list(sample.ids), "meta_info": meta}

    def _add_logprobs(
        self, meta: dict[str, object], sample: SampleCollector, prompt: ScoreList
    ) -> None:
        request, spec = sample.request, sample.request.logprob
        start = spec.start_len
        prompt_ids = [] if start is None else request.input_ids[start:].tolist()
        # Token 0 has nothing before it: the one null there is.
        lead: list[None] = [None] if start == 0 else []
        count = len(sample.ids)
        meta["input_token_logprobs"] = self._chosen([*lead, *prompt.logprobs.tolist()], prompt_ids)
        meta["output_token_logprobs"] = self._chosen(
            sample.output.logprobs.tolist()[:count], sample.ids
        )
        if spec.top_k:
            meta["input_top_logprobs"] = [*lead, *(self._pairs(*pair) for pair in prompt.top)]
            meta["output_top_logprobs"] = [self._pairs(*pair) for pair in sample.output.top[:count]]
        if spec.token_ids:
            ids = np.array(spec.token_ids)
            meta["input_token_ids_logprobs"] = [
                *lead,
                *(self._pairs(ids, row) for row in prompt.given),
            ]
            meta["output_token_ids_logprobs"] = [
                self._pairs(ids, row) for row in sample.output.given[:count]
            ]

    def _chosen(self, logprobs: list[float | None], ids: list[int]) -> list[Entry]:
        # A sample that was cut short has scores for a part of its prompt only.
        return [
            [None if logprob is None else max(logprob, _LEAST), token, self._text(token)]
            for logprob, token in zip(logprobs, ids, strict=False)
        ]

    def _pairs(self, ids: I64, logprobs: F32) -> list[Entry]:
        return [
            [max(logprob, _LEAST), token, self._text(token)]
            for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)


def _finish_dict(reason: FinishReason) -> dict[str, object]:
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    return {"type": "abort", "message": reason.message, "status_code": reason.status_code}


def _joined(parts: list[F32], dtype: type) -> F32:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
