"""Public numeric functions: logprobs and tokens from hidden rows, without the logits matrix.

Owns: the checks of what callers give, so that the passes below take it as valid. It is not the
computation (seawall.sampling), and it knows no engine.

Both functions process logits in this order, all in float32 whatever the inputs are:

    logit = softcap(scale * hidden weight^T) + bias      softcap(x) = c tanh(x / c)
    logit = (logit / r if logit > 0 else logit * r) + a  where `adjust` names (row, id, r, a)
    logit = -inf                                         where `bitmask` forbids the id
    logit = logit / temperature                          0 (below 1e-6): unscaled

`workspace_bytes` bounds the bytes of all temporary tensors, inputs and results excepted. A row
whose product is not finite is NaN, and no other row is. A row's numbers do not depend on what
other rows hold, and on the workspace only within the rounding of the product.
"""

from torch import Tensor, bfloat16, float16, float32, int32, int64

from seawall.core.errors import ConfigError
from seawall.sampling.adjust import SparseAdjust
from seawall.sampling.logprobs import LogprobResult
from seawall.sampling.logprobs import linear_logprobs as _logprobs
from seawall.sampling.sampler import SampleResult
from seawall.sampling.sampler import linear_sample as _sample

__all__ = ["LogprobResult", "SampleResult", "SparseAdjust", "linear_logprobs", "linear_sample"]

_FLOATS = (float32, bfloat16, float16)
_INTEGERS = (int32, int64)
_CHECK_CHUNK = 4096  # checks, too, stay within the workspace


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    *,
    top_k: int = 0,
    token_ids: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    bitmask: Tensor | None = None,
    adjust: SparseAdjust | None = None,
    with_rank: bool = False,
    with_entropy: bool = False,
    workspace_bytes: int = 64 << 20,
    group: object | None = None,
) -> LogprobResult:
    """Log-softmax of processed logits at the ids asked for.

    Args:
        hidden: [rows, H] float32, bfloat16 or float16.
        weight: [V, H] likewise.
        targets: int64 [rows] ids whose logprobs are wanted, or None.
        top_k: best ids wanted a row, 0 to V. Equal logits rank by id, lowest first.
        token_ids: int64 [m], or [rows, m], more ids whose logprobs are wanted.
        temperature: one number or float32 [rows]; 0 counts as 1.
        softcap: c of c tanh(x / c), or None.
        bias: [V], or None.
        scale: factor of the product.
        bitmask: int32 [rows, ceil(V / 32)]; bit i of word w set = id 32 w + i is allowed.
        adjust: sparse changes to logits.
        with_rank: 1 + the number of ids whose logit is strictly greater than the target's.
        with_entropy: of the distribution, in nats.
        workspace_bytes: bound on temporary tensors.
        group: process group over which `weight` is sharded by vocabulary rows.

    Raises:
        ValueError: a shape, dtype or value that cannot be used, or a workspace that is too small;
            the message names the smallest that is not.
    """
    rows, vocab_size = _check_product(hidden, weight, group)
    _check_processing(rows, vocab_size, temperature, softcap, bias, scale)
    _check_bitmask(bitmask, rows, vocab_size)
    _check_adjust(adjust, rows, vocab_size)
    _check_ids(targets, token_ids, rows, vocab_size)
    if not 0 <= top_k <= vocab_size:
        raise ValueError(f"top_k: {top_k} is not in [0, {vocab_size}]; ask for fewer ids")
    if with_rank and targets is None:
        raise ValueError("with_rank: there is no target to rank; give targets")
    return _logprobs(
        hidden.detach(),
        weight.detach(),
        targets,
        top_k=top_k,
        token_ids=token_ids,
        temperature=_number(temperature),
        softcap=softcap,
        bias=bias,
        scale=scale,
        bitmask=bitmask,
        adjust=adjust,
        with_rank=with_rank,
        with_entropy=with_entropy,
        workspace_bytes=workspace_bytes,
    )


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    bitmask: Tensor | None = None,
    adjust: SparseAdjust | None = None,
    workspace_bytes: int = 64 << 20,
    group: object | None = None,
) -> SampleResult:
    """Draw one token a row from the processed logits.

    The draw is a function of the row's logits, its seed and its position alone: not of the other
    rows, their order, the workspace or the route taken. The filters work one after another:
    top_k best; of these, renormalised, the fewest best whose mass reaches top_p; of these, those
    at least min_p times as probable as the best.

    Args:
        hidden: [rows, H] float32, bfloat16 or float16.
        weight: [V, H] likewise.
        seeds: int64 [rows].
        positions: int64 [rows], position of the drawn token in its sequence.
        temperature: one number or float32 [rows]; 0 = the largest logit, lowest id among equals.
        top_k: one integer or integers [rows]; 0, -1 or at least V = off.
        top_p: one number or floats [rows] in (0, 1]; 1 = off.
        min_p: one number or floats [rows] in [0, 1]; 0 = off.
        bias: [V], or None.
        softcap: c of c tanh(x / c), or None.
        scale: factor of the product.
        bitmask: int32 [rows, ceil(V / 32)]; bit i of word w set = id 32 w + i is allowed.
        adjust: sparse changes to logits.
        workspace_bytes: bound on temporary tensors.
        group: process group over which `weight` is sharded by vocabulary rows.

    Raises:
        ValueError: a shape, dtype or value that cannot be used, or a workspace that is too small;
            the message names the smallest that is not.
    """
    rows, vocab_size = _check_product(hidden, weight, group)
    _check_processing(rows, vocab_size, temperature, softcap, bias, scale)
    _check_bitmask(bitmask, rows, vocab_size)
    _check_adjust(adjust, rows, vocab_size)
    _check_tensor("seeds", seeds, (rows,), (int64,))
    _check_tensor("positions", positions, (rows,), (int64,))
    if isinstance(top_k, Tensor):
        _check_tensor("top_k", top_k, (rows,), _INTEGERS)
    _check_values("top_k", top_k, rows, -1, float("inf"))
    _check_values("top_p", top_p, rows, 0.0, 1.0, open_below=True)
    _check_values("min_p", min_p, rows, 0.0, 1.0)
    return _sample(
        hidden.detach(),
        weight.detach(),
        seeds=seeds,
        positions=positions,
        temperature=_number(temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        bias=bias,
        softcap=softcap,
        scale=scale,
        bitmask=bitmask,
        adjust=adjust,
        workspace_bytes=workspace_bytes,
    )


def _number(value: Tensor | float) -> Tensor | float:
    return value if isinstance(value, Tensor) else float(value)


def _check_product(hidden: Tensor, weight: Tensor, group: object | None) -> tuple[int, int]:
    """Rows and vocabulary size of a valid pair."""
    if group is not None:
        raise ConfigError(
            "group: weights sharded over a process group are not built yet; "
            "give the whole weight and group=None"
        )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not multiply; "
            "give [rows, H] and [V, H]"
        )
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"weight: {tuple(weight.shape)} is empty; give at least [1, 1]")
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        if matrix.dtype not in _FLOATS:
            raise ValueError(
                f"{name}: dtype {matrix.dtype} cannot be used; give float32, bfloat16 or float16"
            )
    return hidden.shape[0], weight.shape[0]


def _check_processing(
    rows: int,
    vocab_size: int,
    temperature: Tensor | float,
    softcap: float | None,
    bias: Tensor | None,
    scale: float,
) -> None:
    _check_values("temperature", temperature, rows, 0.0, 1e30)
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise ValueError(f"softcap: {softcap} is not above 0 and finite; give None for no cap")
    if not abs(scale) < float("inf"):
        raise ValueError(f"scale: {scale} is not finite; give a finite number")
    if bias is not None:
        _check_tensor("bias", bias, (vocab_size,), _FLOATS)


def _check_ids(
    targets: Tensor | None, token_ids: Tensor | None, rows: int, vocab_size: int
) -> None:
    if targets is not None:
        _check_tensor("targets", targets, (rows,), _INTEGERS)
        _check_range("targets", targets, vocab_size)
    if token_ids is not None:
        shape = (rows,) if token_ids.dim() > 1 else ()
        _check_tensor("token_ids", token_ids, (*shape, *token_ids.shape[-1:]), _INTEGERS)
        _check_range("token_ids", token_ids, vocab_size)


def _check_bitmask(bitmask: Tensor | None, rows: int, vocab_size: int) -> None:
    if bitmask is not None:
        _check_tensor("bitmask", bitmask, (rows, -(-vocab_size // 32)), (int32,))


def _check_adjust(adjust: SparseAdjust | None, rows: int, vocab_size: int) -> None:
    if adjust is None:
        return
    entries = (adjust.row.shape[0],)
    _check_tensor("adjust.row", adjust.row, entries, (int64,))
    _check_tensor("adjust.ids", adjust.ids, entries, (int64,))
    _check_tensor("adjust.repetition", adjust.repetition, entries, (float32,))
    _check_tensor("adjust.add", adjust.add, entries, (float32,))
    _check_range("adjust.row", adjust.row, rows)
    _check_range("adjust.ids", adjust.ids, vocab_size)
    for first in range(0, entries[0], _CHECK_CHUNK):
        some = adjust.row[first : first + _CHECK_CHUNK + 1]
        if not bool((some[1:] >= some[:-1]).all()):
            raise ValueError("adjust.row: rows do not ascend; sort the entries by row")


def _check_tensor(
    name: str, value: Tensor, shape: tuple[int, ...], dtypes: tuple[object, ...]
) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(value.shape)} is not {shape}; reshape it")
    if value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: dtype {value.dtype} cannot be used; give {names}")


def _check_range(name: str, ids: Tensor, limit: int) -> None:
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limit:
        wrong = low if low < 0 else high
        raise ValueError(f"{name}: {wrong} is not in [0, {limit}); remove it")


def _check_values(
    name: str,
    value: Tensor | float | None,
    rows: int,
    low: float,
    high: float,
    *,
    open_below: bool = False,
) -> None:
    """Refuse numbers outside [low, high], or (low, high]; NaN is outside."""
    if value is None:
        return
    if isinstance(value, Tensor):
        _check_tensor(name, value, (rows,), (*_FLOATS, *_INTEGERS))
        if rows == 0:
            return
        # The smallest and largest are NaN if any is.
        least, most = float(value.min()), float(value.max())
    else:
        least = most = float(value)
    if not (low <= least and most <= high) or (open_below and least == low):
        wrong = least if not low <= least or least == low else most
        interval = f"{'(' if open_below else '['}{low}, {high}]"
        raise ValueError(f"{name}: {wrong} is not in {interval}; change it")
