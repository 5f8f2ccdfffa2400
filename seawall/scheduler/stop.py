"""Why a sample ends: end-of-sequence ids, stop ids, its own limit, or nothing else to be done.

Stop strings are matched where text is (package `text`), which then sends FinishRequest.
"""

from seawall.core.request import Request
from seawall.core.wire import FinishReason


def stop_reason(request: Request, token: int, eos_ids: frozenset[int]) -> FinishReason | None:
    """Why `token`, already counted in `request`, ends it; None if it goes on."""
    if request.num_output >= request.sampling.min_new_tokens:
        if token in request.sampling.stop_token_ids:
            return FinishReason(type="stop", matched=token)
        if token in eos_ids and not request.sampling.ignore_eos:
            return FinishReason(type="stop", matched=token)
    if request.num_output >= request.max_new_tokens:
        return FinishReason(type="length", length=request.num_output)
    return None


def forbidden_ids(request: Request, eos_ids: frozenset[int]) -> list[int]:
    """Ids that would end the request before `min_new_tokens`, sorted.

    A token drawn now is output number num_output + 1; it may end the request only if that is at
    least min_new_tokens. With a grammar that is the mask's to say (banned_ids).
    """
    if request.constraint is not None or request.num_output + 1 >= request.sampling.min_new_tokens:
        return []
    ids = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        ids |= eos_ids
    return sorted(ids)


def banned_ids(request: Request, eos_ids: frozenset[int]) -> list[int]:
    """Ids that a request with a grammar does without as long as the grammar allows others."""
    sampling = request.sampling
    ids: set[int] = set(eos_ids) if sampling.ignore_eos else set()
    if request.num_output + 1 < sampling.min_new_tokens:
        ids |= eos_ids | set(sampling.stop_token_ids)
    return sorted(ids)


def no_pages(request: Request) -> FinishReason:
    """Nothing can be taken from anybody, and still there is no page for it."""
    needed = request.num_prompt + request.max_new_tokens
    return FinishReason(
        type="abort",
        message=f"kv: no pages for {needed} tokens although nothing else runs; see memory_report",
        status_code=500,
    )


def not_finite(request: Request) -> FinishReason:
    """Its logits, or a logprob, are NaN or infinite."""
    return FinishReason(
        type="abort",
        message=f"logits after {request.num_tokens} tokens are not finite; check the weights",
        status_code=500,
    )
