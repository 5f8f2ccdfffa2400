"""From deltas to results: text, stop strings, and SGLang's result dictionary.

One collector a sample; whoever receives the deltas is its only writer. Without stop strings and
without streaming, text is decoded once at the end; where no text is wanted, never.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from seawall.core.params import SamplingParams
from seawall.core.wire import FinishReason, GenerateRequest, OutputDelta
from seawall.offline.forms import LogprobForm
from seawall.offline.scores import ScoreColumns, ScoreTotals
from seawall.text.detokenizer import IncrementalDetokenizer, StopMatch
from seawall.text.tokenizer import Tokenizer


class TextRoom(Protocol):
    """Whoever bounds how many texts are under way."""

    def take(self, num_tokens: int) -> bool:
        """Room for a text of so many tokens, until `give`; False if there is none now."""

    def give(self, num_tokens: int) -> None:
        """The text has ended."""


class AnyRoom:
    """Always room: for a process that bounds its requests otherwise."""

    def take(self, num_tokens: int) -> bool:
        """Always."""
        return True

    def give(self, num_tokens: int) -> None:
        """Nothing was counted."""


_ANY_ROOM = AnyRoom()


class SampleText:
    """The text of one sample, and the stop string that ended it, if one did.

    While there is no room for a text that grows, its ids wait.

    Args:
        tokenizer: None if no text is wanted and no stop string is to be found.
        streaming: text is wanted while it grows; else it is decoded once, at the end, unless stop
            strings have to be found.
        keeps: whether text is wanted, or stop strings are all the tokenizer is for.
        num_tokens: the most there can be.
        room: asked before text is made of the first ids.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        streaming: bool,
        keeps: bool,
        num_tokens: int,
        room: TextRoom,
    ) -> None:
        self.text = ""
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._keeps = keeps
        self._grows = tokenizer is not None and (streaming or bool(sampling.stop))
        self._num_tokens = num_tokens
        self._room: TextRoom = room
        self._waiting: list[int] = []
        self._detokenizer: IncrementalDetokenizer | None = None
        self._has_room = False

    def take(self, delta: OutputDelta) -> StopMatch | None:
        """Add what came; returns the stop string that it completed."""
        if not self._grows:
            return None
        finish = delta.finish
        by_id = finish is not None and finish.matched is not None
        drop = by_id and not self._sampling.no_stop_trim
        self._waiting.extend(delta.output_ids[:-1] if drop else delta.output_ids)
        detokenizer = self._opened(is_last=finish is not None)
        if detokenizer is None:
            return None
        piece = detokenizer.push(self._waiting)
        self._waiting.clear()
        match = detokenizer.match
        if match is None and finish is not None:
            piece += detokenizer.finish()
        if self._keeps:
            self.text += piece
        if match is not None or finish is not None:
            self.close()
        return match

    def close(self) -> None:
        """No more will come; a second call does nothing."""
        self._detokenizer = None
        if self._has_room:
            self._has_room = False
            self._room.give(self._num_tokens)

    def _opened(self, *, is_last: bool) -> IncrementalDetokenizer | None:
        """What makes the text; None while there is no room for one. The last ids need none."""
        assert self._tokenizer is not None
        if self._detokenizer is None:
            self._has_room = not is_last and self._room.take(self._num_tokens)
            if not (self._has_room or is_last):
                return None
            sampling = self._sampling
            self._detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                stop=sampling.stop,
                no_stop_trim=sampling.no_stop_trim,
                min_tokens=sampling.min_new_tokens,
            )
        return self._detokenizer

    def end(self, ids: Sequence[int], *, stopped: bool) -> None:
        """The sample has ended; if it was stopped, by its last id or by a stop string."""
        if not self._grows and self._tokenizer is not None:
            trim = stopped and not self._sampling.no_stop_trim
            self.text = self._tokenizer.decode(
                ids[:-1] if trim else ids,
                skip_special_tokens=self._sampling.skip_special_tokens,
                spaces_between_special_tokens=self._sampling.spaces_between_special_tokens,
            )


class SampleCollector:
    """One sample's output so far.

    Args:
        tokenizer: None if no text is wanted and no stop string is to be found.
        streaming: results are wanted while it grows.
        keeps_text: whether text is wanted, or stop strings are all the tokenizer is for.
        totals: takes the prompt's scores instead of `prompt`, if only their sum is wanted.
        charge: told of host bytes taken for scores.
        room: bounds the texts under way.
    """

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        tokenizer: Tokenizer | None,
        *,
        streaming: bool,
        keeps_text: bool,
        totals: ScoreTotals | None,
        charge: Callable[[int], None],
        room: TextRoom = _ANY_ROOM,
    ) -> None:
        self.request = request
        self.index = index
        self.ids: list[int] = []
        spec, num_prompt = request.logprob, len(request.input_ids)
        start = num_prompt if spec.start_len is None else spec.start_len
        # Token 0 has nothing before it.
        lead = 1 if start == 0 else 0
        self.prompt = ScoreColumns(num_prompt - start, spec, lead=lead, charge=charge)
        self.output = ScoreColumns(request.max_new_tokens, spec, charge=charge)
        self.totals = totals
        self.finish: dict[str, object] | None = None
        self.last: OutputDelta | None = None
        self.seconds = 0.0
        self._started = time.perf_counter()
        self._text = SampleText(
            request.sampling,
            tokenizer,
            streaming=streaming,
            keeps=keeps_text,
            num_tokens=request.max_new_tokens,
            room=room,
        )

    def close(self) -> None:
        """Nobody listens any more."""
        self._text.close()

    @property
    def text(self) -> str:
        """So far; empty if it is not wanted, or decoded at the end only."""
        return self._text.text

    def take(self, delta: OutputDelta) -> int | None:
        """Take a delta; returns the output length if a stop string has just ended the sample."""
        if self.finish is not None:
            return None
        self.last = delta
        self.ids.extend(delta.output_ids)
        (self.prompt if self.totals is None else self.totals).add(delta.prompt_scores)
        self.output.add(delta.output_scores)
        match = self._text.take(delta)
        if match is not None:
            del self.ids[match.num_tokens :]
            self._end({"type": "stop", "matched": match.matched})
            return match.num_tokens
        if delta.finish is not None:
            self._end(_finish_dict(delta.finish))
        return None

    def _end(self, finish: dict[str, object]) -> None:
        self.finish = finish
        self.seconds = time.perf_counter() - self._started
        # A grammar that has come to its end names no token to drop.
        self._text.end(self.ids, stopped=isinstance(finish.get("matched"), int | str))


class ResultWriter:
    """Writes SGLang's result dictionary of a sample, logprobs in the form of the call."""

    def __init__(self, form: LogprobForm) -> None:
        self._form = form

    def result(self, sample: SampleCollector, prompt: ScoreColumns) -> dict[str, object]:
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
            "weight_version": "default" if last is None else last.weight_version,
            "e2e_latency": sample.seconds,
        }
        if request.logprob.wanted:
            self._form.add_to(meta, request, prompt, sample.output, sample.ids)
        return {"text": sample.text, "output_ids": list(sample.ids), "meta_info": meta}


def _finish_dict(reason: FinishReason) -> dict[str, object]:
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    return {"type": "abort", "message": reason.message, "status_code": reason.status_code}
