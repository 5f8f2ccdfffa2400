"""Events of a /generate stream: SGLang's result as it grows, all of it again or only what is new.

What was written once as JSON is kept as text and copied, so that the work of a stream grows with
what the engine writes, not with its square; only the copying of a cumulative stream does.

    {"text":"Once upon a","output_ids":[11,12,13],"meta_info":{..., "output_token_logprobs":[...]}}
             `-- kept, grown --'         `kept -'                          kept, grown -----'
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from seawall.offline.collect import SampleCollector
from seawall.offline.inputs import Call
from seawall.offline.scores import ScoreColumns
from seawall.text.tokenizer import Tokenizer

_ENCODE = msgspec.json.encode
Entry = list[object]


@dataclass(slots=True)
class _Written:
    """How far a sample was written, and the lists and the text as they were."""

    num_chars: int = 0
    num_ids: int = 0
    num_prompt: int = 0
    text: bytearray = field(default_factory=bytearray)
    lists: dict[str, bytearray] = field(default_factory=dict)


class StreamWriter:
    """Writes the events of one call.

    Args:
        tokenizer: gives the text of logprob entries, if the call asks for it.
        incremental: an event carries what is new, not all there is.
    """

    def __init__(self, call: Call, tokenizer: Tokenizer | None, *, incremental: bool) -> None:
        self._texts = tokenizer if call.text_in_logprobs else None
        self._incremental = incremental
        self._is_many = call.is_batch or call.num_results > 1
        self._written: dict[tuple[str, int], _Written] = {}

    def event(self, sample: SampleCollector, prompt: ScoreColumns, at: int) -> bytes:
        """The event for a sample that has grown; `at` is its place among the call's samples."""
        written = self._written.setdefault((sample.request.rid, sample.index), _Written())
        text = _ENCODE(sample.text[written.num_chars :])[1:-1]
        lists = {"output_ids": _items(sample.ids[written.num_ids :])}
        if sample.request.logprob.wanted:
            lists |= self._logprobs(sample, prompt, written)
        written.num_chars, written.num_ids = len(sample.text), len(sample.ids)
        if not self._incremental:
            written.text += text
            text = bytes(written.text)
            for name, part in lists.items():
                _append(written.lists.setdefault(name, bytearray()), part)
            lists = {name: bytes(kept) for name, kept in written.lists.items()}
        ids = lists.pop("output_ids")
        meta = _ENCODE(_meta(sample))[:-1] + b"".join(
            b',"%s":[%s]' % (name.encode(), part) for name, part in lists.items()
        )
        index = b',"index":%d' % at if self._is_many else b""
        whole = (text, ids, meta, index)
        return b'data: {"text":"%s","output_ids":[%s],"meta_info":%s}%s}\n\n' % whole

    def _logprobs(
        self, sample: SampleCollector, prompt: ScoreColumns, written: _Written
    ) -> dict[str, bytes]:
        """The new entries of each list."""
        request = sample.request
        lists: dict[str, bytes] = {}
        start = request.logprob.start_len
        begin, end = written.num_prompt, 0 if start is None else prompt.count
        ids = [] if start is None else request.input_ids[start + begin : start + end].tolist()
        lists |= self._side("input", sample, prompt, ids, begin)
        written.num_prompt = end
        begin = written.num_ids
        return lists | self._side("output", sample, sample.output, sample.ids[begin:], begin)

    def _side(
        self,
        side: str,
        sample: SampleCollector,
        columns: ScoreColumns,
        ids: Sequence[int],
        begin: int,
    ) -> dict[str, bytes]:
        """Entries of the positions from `begin` on, whose tokens are `ids`."""
        spec = sample.request.logprob
        chosen: list[Entry] = []
        top: list[list[Entry] | None] = []
        given: list[list[Entry] | None] = []
        for at, token in enumerate(ids, begin):
            if at < columns.lead:
                chosen.append(self._entry(None, token))
                top.append(None)
                given.append(None)
                continue
            chosen.append(self._entry(float(columns.logprobs[at]), token))
            if spec.top_k:
                top.append(
                    self._row(columns.top_logprobs[at].tolist(), columns.top_ids[at].tolist())
                )
            if spec.token_ids:
                given.append(self._row(columns.token_logprobs[at].tolist(), spec.token_ids))
        lists = {f"{side}_token_logprobs": _items(chosen)}
        if spec.top_k:
            lists[f"{side}_top_logprobs"] = _items(top)
        if spec.token_ids:
            lists[f"{side}_token_ids_logprobs"] = _items(given)
        return lists

    def _row(self, logprobs: Iterable[float], ids: Iterable[int]) -> list[Entry]:
        return [self._entry(value, token) for value, token in zip(logprobs, ids, strict=True)]

    def _entry(self, logprob: float | None, token: int) -> Entry:
        text = None if self._texts is None else self._texts.token_text(token)
        return [logprob, token, text]


def _meta(sample: SampleCollector) -> dict[str, object]:
    """What is written anew each time."""
    request, last = sample.request, sample.last
    return {
        "id": request.rid if request.sampling.n == 1 else f"{request.rid}_{sample.index}",
        "finish_reason": sample.finish,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(sample.ids),
        "cached_tokens": 0 if last is None else last.cached_tokens,
        "num_retractions": 0 if last is None else last.num_retractions,
        "weight_version": "default" if last is None else last.weight_version,
        "e2e_latency": sample.seconds,
    }


def _items(values: Sequence[object]) -> bytes:
    """The inside of a JSON list."""
    return _ENCODE(values)[1:-1]


def _append(kept: bytearray, part: bytes) -> None:
    if kept and part:
        kept += b","
    kept += part
