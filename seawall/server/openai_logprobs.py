"""Logprobs in the forms of /v1/*: OpenAI's for completions and chats, and vLLM's for prompts.

What scoring harnesses rely on: the chosen token's number is the same float wherever it stands, it
stands in its position's alternatives, and only the first token of a text has none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seawall.offline.scores import ScoreColumns
from seawall.text.stream import open_stream
from seawall.text.tokenizer import Tokenizer

# JSON has no infinity; clients take this for "impossible", as vLLM's do.
_LEAST = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One token and its logprobs.

    Attributes:
        logprob: None for the first token of a prompt.
        top: (id, logprob) best first, k of them; the chosen token's number is `logprob` there too.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def positions(
    columns: ScoreColumns, ids: Sequence[int], start: int, end: int, top_k: int
) -> Iterator[Position]:
    """Positions [start, end) of a prompt or an output; `ids` are those of all its positions."""
    for at in range(start, min(end, columns.count, len(ids))):
        token = ids[at]
        if at < columns.lead:
            yield Position(token=token, logprob=None, top=())
            continue
        chosen = max(float(columns.logprobs[at]), _LEAST)
        best, values = columns.top_ids[at, :top_k].tolist(), columns.top_logprobs[at, :top_k]
        yield Position(
            token=token,
            logprob=chosen,
            top=tuple(
                (other, chosen if other == token else max(value, _LEAST))
                for other, value in zip(best, values.tolist(), strict=True)
            ),
        )


class Names:
    """How tokens are written.

    Args:
        as_ids: as "token_id:42" instead of their text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        """One token."""
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def encoded(self, token: int) -> list[int]:
        """The bytes of one token's text."""
        if self._tokenizer.is_byte_level:
            return list(self._tokenizer.token_bytes(token))
        return list(self._tokenizer.token_text(token).encode())


class Offsets:
    """Where each token begins in a text that grows: characters written before it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._stream = open_stream(tokenizer, skip_special_tokens, True)
        self._num_chars = 0

    def take(self, token: int) -> int:
        """The offset of the next token."""
        offset = self._num_chars
        self._num_chars += len(self._stream.push(token))
        return offset


def completion_logprobs(
    found: Sequence[Position], names: Names, offsets: Offsets
) -> dict[str, object]:
    """OpenAI's four lists, one entry a token."""
    top: list[dict[str, float] | None] = []
    for position in found:
        if position.logprob is None:
            top.append(None)
            continue
        alternatives: dict[str, float] = {}
        for token, value in (*position.top, (position.token, position.logprob)):
            name = names.name(token)
            # Halves of a character read alike: the likelier one stands for all.
            alternatives[name] = max(value, alternatives.get(name, value))
        top.append(alternatives)
    return {
        "text_offset": [offsets.take(position.token) for position in found],
        "tokens": [names.name(position.token) for position in found],
        "token_logprobs": [position.logprob for position in found],
        "top_logprobs": top,
    }


def chat_logprobs(found: Sequence[Position], names: Names) -> dict[str, object]:
    """OpenAI's list of objects."""
    return {
        "content": [
            {
                **_chat_entry(position.token, position.logprob or 0.0, names),
                "top_logprobs": [_chat_entry(*pair, names) for pair in position.top],
            }
            for position in found
        ],
        "refusal": None,
    }


def _chat_entry(token: int, logprob: float, names: Names) -> dict[str, object]:
    return {"token": names.name(token), "logprob": logprob, "bytes": names.encoded(token)}


def prompt_logprobs(
    found: Sequence[Position], tokenizer: Tokenizer
) -> list[dict[str, object] | None]:
    """VLLM's list: id to logprob, rank and text; a rank beyond the alternatives is not known."""
    result: list[dict[str, object] | None] = []
    for position in found:
        if position.logprob is None:
            result.append(None)
            continue
        entries: dict[str, object] = {}
        for rank, (token, value) in enumerate(position.top, 1):
            entries[str(token)] = _prompt_entry(tokenizer, token, value, rank)
        if str(position.token) not in entries:
            entries[str(position.token)] = _prompt_entry(
                tokenizer, position.token, position.logprob, None
            )
        result.append(entries)
    return result


def _prompt_entry(
    tokenizer: Tokenizer, token: int, logprob: float, rank: int | None
) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token)}
