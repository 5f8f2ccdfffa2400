"""Messages between a front end (the offline Engine, the server) and the engine core.

msgspec structs, so that the same types travel in process and over a socket. Arrays are numpy;
a socket encodes them as bytes.
"""

import msgspec

from seawall.core.params import LogprobSpec, SamplingParams
from seawall.core.step import I32, Scores


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt; `sampling.n` samples of it.

    Attributes:
        rid: names the request; unique among those alive.
        input_ids: int32 [prompt tokens].
        max_new_tokens: resolved against the context.
        seed: of sample 0; the others derive theirs from it and their index.
    """

    rid: str
    input_ids: I32
    sampling: SamplingParams
    logprob: LogprobSpec
    max_new_tokens: int
    seed: int
    priority: int = 0
    extra_key: str | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """End a request and all its samples; rid None ends every request."""

    rid: str | None


class FinishRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A stop string was completed by output token `num_output` of a sample."""

    rid: str
    index: int
    num_output: int


class FlushCache(msgspec.Struct, frozen=True, kw_only=True):
    """Drop every cached page that no request holds."""

    ticket: int


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a sample ended.

    Attributes:
        type: "stop", "length" or "abort".
        matched: the id that stopped it.
        length: output tokens, for "length".
        message, status_code: for "abort".
    """

    type: str
    matched: int | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one sample.

    Attributes:
        output_ids: new tokens.
        prompt_scores: logprobs of prompt tokens, in order, without the first token of the prompt.
        output_scores: logprobs of `output_ids`.
        finish: set on the last message of the sample.
        cached_tokens: prompt tokens that were not computed for this sample.
        weight_version: of the weights that computed it.
    """

    rid: str
    index: int
    output_ids: tuple[int, ...] = ()
    prompt_scores: Scores | None = None
    output_scores: Scores | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    num_retractions: int = 0
    weight_version: str = "default"


class CacheFlushed(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to FlushCache."""

    ticket: int
    done: bool


ToCore = GenerateRequest | AbortRequest | FinishRequest | FlushCache
FromCore = OutputDelta | CacheFlushed
