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
other rows hold, and on the workspace only within the rounding of the product (on CUDA not at all).

Tensors lie on one device, CPU or CUDA; results lie there too. With `group`, every rank calls with
its consecutive part of the weight, in rank order, and with the same of everything else, bias,
bitmask and ids being those of the whole vocabulary; every rank gets the whole result.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, bfloat16, float16, float32, int32, int64

from seawall.sampling import entry, sharded, sharded_draw
from seawall.sampling.adjust import SparseAdjust
from seawall.sampling.logprobs import Ask, LogprobResult
from seawall.sampling.sampler import DrawInput, SampleResult
from seawall.sampling.sharded import Shard
from seawall.sampling.tiles import LogitsInput

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
    group: dist.ProcessGroup | None = None,
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
        group: process group over which `weight` is sharded by vocabulary rows; each part has at
            least one.

    Raises:
        ValueError: a shape, dtype or value that cannot be used, or a workspace that is too small;
            the message names the smallest that is not.
    """
    source = _source(hidden, weight, temperature, softcap, scale, bias, bitmask, adjust)
    ask = Ask(
        targets=targets, token_ids=token_ids, top_k=top_k, rank=with_rank, entropy=with_entropy
    )
    shard = None
    if group is not None:
        need = sharded.score_need(source, ask, _num_ranks(group))
        shard = Shard.of(group, source, need)
    call = _Call.of(source, shard)
    _check_processing(call, source)
    _check_ids(call, targets, token_ids)
    if not 0 <= top_k <= call.vocab_size:
        raise ValueError(f"top_k: {top_k} is not in [0, {call.vocab_size}]; ask for fewer ids")
    if with_rank and targets is None:
        raise ValueError("with_rank: there is no target to rank; give targets")
    if shard is not None:
        return sharded.score_rows(source, ask, workspace_bytes, shard)
    return entry.score_rows(source, ask, workspace_bytes)


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
    group: dist.ProcessGroup | None = None,
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
        group: process group over which `weight` is sharded by vocabulary rows; each part has at
            least one.

    Raises:
        ValueError: a shape, dtype or value that cannot be used, or a workspace that is too small;
            the message names the smallest that is not.
    """
    source = _source(hidden, weight, temperature, softcap, scale, bias, bitmask, adjust)
    draw = DrawInput(seeds=seeds, positions=positions, top_k=top_k, top_p=top_p, min_p=min_p)
    shard = None
    if group is not None:
        need = sharded_draw.sample_need(source, draw, _num_ranks(group))
        shard = Shard.of(group, source, need)
    call = _Call.of(source, shard)
    _check_processing(call, source)
    call.check("seeds", seeds, (call.rows,), (int64,))
    call.check("positions", positions, (call.rows,), (int64,))
    if isinstance(top_k, Tensor):
        call.check("top_k", top_k, (call.rows,), _INTEGERS)
    call.check_values("top_k", top_k, -1, float("inf"))
    call.check_values("top_p", top_p, 0.0, 1.0, open_below=True)
    call.check_values("min_p", min_p, 0.0, 1.0)
    if shard is not None:
        return sharded_draw.sample_rows(source, draw, workspace_bytes, shard)
    return entry.sample_rows(source, draw, workspace_bytes)


def _num_ranks(group: object) -> int:
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group: {type(group).__name__} is not a torch.distributed process group; "
            "give one, or None for the whole weight"
        )
    return group.size()


def _source(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor | float,
    softcap: float | None,
    scale: float,
    bias: Tensor | None,
    bitmask: Tensor | None,
    adjust: SparseAdjust | None,
) -> LogitsInput:
    """The product and its processing; the product is checked here, the rest later."""
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
    return LogitsInput(
        hidden=hidden.detach(),
        weight=weight.detach(),
        temperature=temperature if isinstance(temperature, Tensor) else float(temperature),
        softcap=softcap,
        scale=scale,
        bias=bias,
        bitmask=bitmask,
        adjust=adjust,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What arguments are checked against. Checks read values, so on CUDA they wait for them."""

    rows: int
    vocab_size: int
    device: torch.device

    @staticmethod
    def of(source: LogitsInput, shard: Shard | None) -> "_Call":
        call = _Call(
            rows=source.hidden.shape[0],
            vocab_size=source.vocab_size if shard is None else shard.vocab_size,
            device=source.hidden.device,
        )
        call._check_device("weight", source.weight)
        return call

    def _check_device(self, name: str, value: Tensor) -> None:
        if value.device != self.device:
            raise ValueError(
                f"{name}: lies on {value.device}, hidden on {self.device}; move one to the other"
            )

    def check(
        self, name: str, value: Tensor, shape: tuple[int, ...], dtypes: tuple[object, ...]
    ) -> None:
        """Refuse another shape, dtype or device."""
        if tuple(value.shape) != shape:
            raise ValueError(f"{name}: shape {tuple(value.shape)} is not {shape}; reshape it")
        if value.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name}: dtype {value.dtype} cannot be used; give {names}")
        self._check_device(name, value)

    def check_values(
        self,
        name: str,
        value: Tensor | float | None,
        low: float,
        high: float,
        *,
        open_below: bool = False,
    ) -> None:
        """Refuse numbers outside [low, high], or (low, high]; NaN is outside."""
        if value is None:
            return
        if isinstance(value, Tensor):
            self.check(name, value, (self.rows,), (*_FLOATS, *_INTEGERS))
            if self.rows == 0:
                return
            # The smallest and largest are NaN if any is.
            least, most = float(value.min()), float(value.max())
        else:
            least = most = float(value)
        if not (low <= least and most <= high) or (open_below and least == low):
            wrong = least if not low <= least or least == low else most
            interval = f"{'(' if open_below else '['}{low}, {high}]"
            raise ValueError(f"{name}: {wrong} is not in {interval}; change it")


def _check_processing(call: _Call, source: LogitsInput) -> None:
    call.check_values("temperature", source.temperature, 0.0, 1e30)
    softcap = source.softcap
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise ValueError(f"softcap: {softcap} is not above 0 and finite; give None for no cap")
    if not abs(source.scale) < float("inf"):
        raise ValueError(f"scale: {source.scale} is not finite; give a finite number")
    if source.bias is not None:
        call.check("bias", source.bias, (call.vocab_size,), _FLOATS)
    if source.bitmask is not None:
        words = -(-call.vocab_size // 32)
        call.check("bitmask", source.bitmask, (call.rows, words), (int32,))
    if source.adjust is not None:
        _check_adjust(call, source.adjust)


def _check_ids(call: _Call, targets: Tensor | None, token_ids: Tensor | None) -> None:
    if targets is not None:
        call.check("targets", targets, (call.rows,), _INTEGERS)
        _check_range("targets", targets, call.vocab_size)
    if token_ids is not None:
        shape = (call.rows,) if token_ids.dim() > 1 else ()
        call.check("token_ids", token_ids, (*shape, *token_ids.shape[-1:]), _INTEGERS)
        _check_range("token_ids", token_ids, call.vocab_size)


def _check_adjust(call: _Call, adjust: SparseAdjust) -> None:
    entries = (adjust.row.shape[0],)
    call.check("adjust.row", adjust.row, entries, (int64,))
    call.check("adjust.ids", adjust.ids, entries, (int64,))
    call.check("adjust.repetition", adjust.repetition, entries, (float32,))
    call.check("adjust.add", adjust.add, entries, (float32,))
    _check_range("adjust.row", adjust.row, call.rows)
    _check_range("adjust.ids", adjust.ids, call.vocab_size)
    for first in range(0, entries[0], _CHECK_CHUNK):
        some = adjust.row[first : first + _CHECK_CHUNK + 1]
        if not bool((some[1:] >= some[:-1]).all()):
            raise ValueError("adjust.row: rows do not ascend; sort the entries by row")


def _check_range(name: str, ids: Tensor, limit: int) -> None:
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limit:
        wrong = low if low < 0 else high
        raise ValueError(f"{name}: {wrong} is not in [0, {limit}); remove it")
