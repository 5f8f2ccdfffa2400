"""Layers and the operations under them against plain formulas."""

import math

import pytest
import torch
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from seawall.kernels import reference
from seawall.layers.embedding import ScaledEmbedding
from seawall.layers.linear import Linear
from seawall.layers.norm import OffsetRMSNorm, RMSNorm
from seawall.layers.rope import Rotary, inverse_frequencies
from seawall.memory.rope_spec import RopeSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rope(**changes: object) -> RopeSpec:
    values = {"kind": "default", "theta": 10000.0, "rotary_dim": 8, "original_context": 64}
    return RopeSpec(**(values | changes))  # type: ignore[arg-type]


def rotate_one(vector: torch.Tensor, position: int, spec: RopeSpec) -> torch.Tensor:
    """The definition: pair (i, i + R/2) turns by position * theta^(-2i/R)."""
    out = vector.clone().double()
    half = spec.rotary_dim // 2
    for pair in range(half):
        angle = position * spec.theta ** (-2 * pair / spec.rotary_dim)
        a, b = vector[pair].double(), vector[pair + half].double()
        out[pair] = a * math.cos(angle) - b * math.sin(angle)
        out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out.float()


@pytest.mark.parametrize("head_dim", [8, 12])
def test_rotation_by_its_definition(head_dim: int) -> None:
    spec = rope()
    rotary = Rotary(spec, torch.empty(4), torch.float32)
    positions = torch.tensor([0, 1, 5, 63])
    x = torch.randn(4, 3, head_dim)
    expected = torch.stack(
        [
            torch.stack([rotate_one(head, int(position), spec) for head in row])
            for row, position in zip(x, positions, strict=True)
        ]
    )
    rotation = rotary(positions)
    found = reference.rotate_(x, rotation.cos, rotation.sin)
    assert found is x
    assert torch.allclose(found, expected, atol=1e-5)


def test_positions_may_be_32_bit() -> None:
    rotary = Rotary(rope(kind="dynamic", factor=2.0), torch.empty(4), torch.float32)
    positions = torch.tensor([3, 70, 100])
    short, long = rotary(positions.int()), rotary(positions)
    assert torch.equal(short.cos, long.cos)
    assert torch.equal(short.sin, long.sin)


def test_dynamic_rotation_depends_on_the_position_alone() -> None:
    rotary = Rotary(rope(kind="dynamic", factor=2.0), torch.empty(4), torch.float32)
    together = rotary(torch.tensor([10, 90, 120]))
    for row, position in enumerate((10, 90, 120)):
        alone = rotary(torch.tensor([position]))
        assert torch.equal(together.cos[row], alone.cos[0])
    plain = Rotary(rope(), torch.empty(4), torch.float32)(torch.tensor([10, 90, 120]))
    assert torch.allclose(together.cos[0], plain.cos[0])
    assert not torch.allclose(together.cos[1], plain.cos[1], atol=1e-2)


def test_attention_factor_scales_the_rotation() -> None:
    positions = torch.tensor([2])
    plain = Rotary(rope(), torch.empty(4), torch.float32)(positions)
    scaled = Rotary(rope(attention_factor=1.5), torch.empty(4), torch.float32)(positions)
    assert torch.allclose(scaled.cos, plain.cos * 1.5)
    assert torch.allclose(scaled.sin, plain.sin * 1.5)


def test_frequencies_are_float32_whatever_the_model() -> None:
    assert inverse_frequencies(rope(kind="yarn", factor=4.0)).dtype == torch.float32
    rotary = Rotary(rope(), torch.empty(4), torch.bfloat16)
    found = rotary(torch.tensor([50_000])).cos.float()
    angles = 50_000 * inverse_frequencies(rope())
    assert torch.allclose(found[0, :4], angles.cos(), atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_by_its_formula(dtype: torch.dtype) -> None:
    x = torch.randn(5, 16).mul(3).to(dtype)
    weight = torch.randn(16).to(dtype)
    wide = x.float()
    scaled = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = scaled.to(dtype) * weight
    norm = RMSNorm(weight, 1e-3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(norm(x), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(norm.apply_(x.clone()), norm(x))


def test_norm_in_place_of_a_part() -> None:
    fused = torch.randn(4, 6, 8)
    before = fused.clone()
    norm = RMSNorm(torch.randn(8), 1e-6)
    norm.apply_(fused[:, 1:3])
    assert torch.equal(fused[:, 1:3], norm(before[:, 1:3]))
    assert torch.equal(fused[:, 3:], before[:, 3:])
    assert torch.equal(fused[:, :1], before[:, :1])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gate_by_its_formula(activation: str) -> None:
    gate, up = torch.randn(3, 10), torch.randn(3, 10)
    by_name = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
    }
    expected = by_name[activation](gate) * up
    found = reference.gate_(torch.cat((gate, up), -1), activation)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_adds_to_the_residual(has_bias: bool) -> None:
    linear = Linear(torch.randn(6, 4), torch.randn(6) if has_bias else None)
    x, residual = torch.randn(3, 4), torch.randn(3, 6)
    expected = residual + linear(x)
    linear.add_to(residual, x)
    assert torch.allclose(residual, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_offset_norm_is_that_of_gemma(dtype: torch.dtype) -> None:
    """Against transformers' own, to the bit in 16 bits: rounded once, after 1 + weight."""
    x = torch.randn(7, 3, 24).to(dtype)
    theirs = Gemma3RMSNorm(24, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.normal_(0.0, 0.5)
        expected = theirs(x)
        ours = OffsetRMSNorm(theirs.weight, 1e-5)
        assert torch.allclose(ours(x), expected, rtol=0, atol=2e-6 if dtype.itemsize == 4 else 0)
        copy = x.clone()
        assert ours.apply_(copy) is copy
        assert torch.equal(copy, ours(x))
        assert not torch.allclose(RMSNorm(theirs.weight, 1e-5)(x), expected, atol=0.1)


def test_a_scaled_embedding_leaves_its_matrix_alone() -> None:
    weight = torch.randn(5, 4)
    kept = weight.clone()
    found = ScaledEmbedding(weight, 2.5)(torch.tensor([3, 0, 3]))
    assert torch.equal(found, kept[[3, 0, 3]] * 2.5)
    assert torch.equal(weight, kept)
