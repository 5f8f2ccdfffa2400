"""The decoder's numeric operations on CUDA, one kernel each; twins of those in reference.py.

Owns: the kernels and their launches. Rounds where the twins round, except that a rotation is
rounded once. Keeps no state and makes no tensor but the results that its callers ask for.

Legend: T rows, N heads, D width of a row or a head, R rotated part of a head, I width of the gated
MLP.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

_GATE_BLOCK = 1024
_ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}


@triton.jit
def _norm_kernel(
    x, weight, out, eps, stride_xt, stride_xn, stride_ot, stride_on,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    ds = tl.arange(0, BLOCK)
    mask = ds < D
    row = tl.load(x + token * stride_xt + head * stride_xn + ds, mask=mask, other=0.0)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * scale).to(row.dtype).to(tl.float32)
    gain = tl.load(weight + ds, mask=mask, other=0.0).to(tl.float32)
    result = (normed * gain).to(row.dtype)
    tl.store(out + token * stride_ot + head * stride_on + ds, result, mask=mask)


@triton.jit
def _rotate_kernel(
    x, cos, sin, stride_xt, stride_xn, stride_c, num_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    ds = tl.arange(0, BLOCK)
    inside = ds < HALF
    mask = (heads < num_heads)[:, None] & inside[None, :]
    c_D = tl.load(cos + token * stride_c + ds, mask=inside, other=0.0).to(tl.float32)
    # The second half of the sines carries no sign.
    s_D = tl.load(sin + token * stride_c + HALF + ds, mask=inside, other=0.0).to(tl.float32)
    c2_D = tl.load(cos + token * stride_c + HALF + ds, mask=inside, other=0.0).to(tl.float32)
    at = x + token * stride_xt + heads[:, None] * stride_xn + ds[None, :]
    a = tl.load(at, mask=mask, other=0.0)
    b = tl.load(at + HALF, mask=mask, other=0.0)
    left = a.to(tl.float32) * c_D[None, :] - b.to(tl.float32) * s_D[None, :]
    right = b.to(tl.float32) * c2_D[None, :] + a.to(tl.float32) * s_D[None, :]
    tl.store(at, left.to(a.dtype), mask=mask)
    tl.store(at + HALF, right.to(b.dtype), mask=mask)


@triton.jit
def _gate_kernel(gate_up, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    ds = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ds < WIDTH
    at = gate_up + token * stride + ds
    raw = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    gate = raw.to(tl.float32)
    if KIND == 0:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        gate = tl.maximum(gate, 0.0)
    elif KIND == 2:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    result = gate.to(raw.dtype).to(tl.float32) * up
    tl.store(at, result.to(raw.dtype), mask=mask)


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension of [T, D] or [T, N, D]; see reference.py."""
    result = torch.empty_like(x) if out is None else out
    if x.numel() == 0:
        return result
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    _norm_kernel[(x.shape[0], heads)](
        x, weight_D, result, eps,
        x.stride(0), x.stride(1) if heads > 1 else 0,
        result.stride(0), result.stride(1) if heads > 1 else 0,
        D=width, BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return result


def rotate_(x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotates the first R entries of every head in place; see reference.py."""
    num_tokens, num_heads, _ = x_TND.shape
    if num_tokens:
        half = cos_TR.shape[-1] // 2
        block = triton.next_power_of_2(half)
        heads = min(triton.next_power_of_2(num_heads), max(1, 1024 // block))
        _rotate_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x_TND, cos_TR, sin_TR, x_TND.stride(0), x_TND.stride(1), cos_TR.stride(0), num_heads,
            HALF=half, BLOCK=block, HEADS=heads, num_warps=4,
        )  # fmt: skip
    return x_TND


def gate_(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up for [T, 2I]; the result is the first half, in place; see reference.py."""
    num_tokens, both = gate_up.shape
    width = both // 2
    if num_tokens:
        _gate_kernel[(num_tokens, triton.cdiv(width, _GATE_BLOCK))](
            gate_up, gate_up.stride(0), WIDTH=width, BLOCK=_GATE_BLOCK,
            KIND=_ACTIVATIONS[activation], num_warps=4,
        )  # fmt: skip
    return gate_up[:, :width]
