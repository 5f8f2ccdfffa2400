"""Models with window layers over two pools of pages, against transformers in float32.

The pages are handed out here by hand, as a scheduler would: a window page goes back as soon as its
last position has left every window, is overwritten with NaN, and is the next one given out. Each
request has as many window pages as its window and one chunk can touch.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from seawall.attention.base import AttentionRows, ScoreRules
from seawall.attention.hybrid import HybridAttention
from seawall.attention.torch_sdpa import TorchAttention
from seawall.device.arena import Arena
from seawall.kv.pool import KVPool
from seawall.memory.footprint import Limits
from seawall.memory.spec import ModelSpec
from seawall.models.base import CausalLM
from tests.models.checkpoints import SIZES, load, random_model, reference, save, tokens

CPU = torch.device("cpu")
WINDOW, NEW, CONTEXT = 8, 6, 64
# Several windows long, and one that ends within its first.
LENGTHS = (45, 21, 5)
DEEP = SIZES | {"num_hidden_layers": 3}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
FAMILIES: dict[str, Any] = {
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": transformers.Qwen2Config(
        **DEEP, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma2": transformers.Gemma2Config(
        **DEEP, **GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=3.0
    ),
    "gemma3": transformers.Gemma3TextConfig(**DEEP, **GEMMA, sliding_window_pattern=3),
}
PAGE_SIZES, CHUNKS = (1, 16, 64), (1, 7, CONTEXT)


class Pages:
    """One class of pages: a pool, a table, and who holds what."""

    def __init__(self, pool: KVPool, num_seats: int, pages_per_seq: int) -> None:
        self.pool = pool
        self.free = list(range(pool.num_pages))
        self.held: list[dict[int, int]] = [{} for _ in range(num_seats)]
        # Stale and unset entries point nowhere.
        self.table = np.full((num_seats, pages_per_seq), 2**30, dtype=np.int32)

    def hold(self, seat: int, first: int, end: int) -> None:
        """Exactly the columns that [first, end) touches; the others go back."""
        page_size, held = self.pool.page_size, self.held[seat]
        for column in [c for c in held if c < first // page_size]:
            page = held.pop(column)
            for layer in range(self.pool.num_layers):
                slots = slice(page * page_size, (page + 1) * page_size)
                self.pool.keys(layer)[:, slots] = math.nan
                self.pool.values(layer)[:, slots] = math.nan
            self.free.append(page)
            self.table[seat, column] = 2**30
        for column in range(first // page_size, (end - 1) // page_size + 1):
            if column not in held:
                held[column] = self.table[seat, column] = self.free.pop()


class Stepper:
    """A model over two pools of just so many pages."""

    def __init__(self, model: CausalLM, spec: ModelSpec, page_size: int, chunk: int) -> None:
        self.model, self.chunk = model, chunk
        seats = len(LENGTHS)
        limits = Limits(
            max_running=seats,
            step_tokens=seats * CONTEXT,
            context_length=CONTEXT,
            page_size=page_size,
        )
        arena = Arena.unbounded(CPU)
        assert spec.window is not None
        per_seq = min(-(-(spec.window + chunk) // page_size) + 1, limits.pages_per_seq)

        def pages(num_layers: int, num_pages: int) -> Pages:
            pool = KVPool(
                arena,
                num_layers=num_layers,
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=torch.float32,
            )
            return Pages(pool, seats, limits.pages_per_seq)

        def backend(pool: KVPool, window: int | None) -> TorchAttention:
            rules = ScoreRules(window=window, softcap=spec.attention_softcap)
            scale = spec.softmax_scale
            return TorchAttention(
                pool, arena, num_heads=spec.num_heads, scale=scale, limits=limits, rules=rules
            )

        self.full = pages(spec.num_full_layers, seats * limits.pages_per_seq)
        self.window = pages(spec.num_window_layers, seats * per_seq)
        self.attention = HybridAttention(
            spec.windows,
            full=backend(self.full.pool, None) if spec.num_full_layers else None,
            window=backend(self.window.pool, spec.window),
        )
        self.done = [0] * seats

    def step(self, sequences: list[Tensor]) -> list[Tensor]:
        """Computes the next chunk of each sequence that has one; logits of each."""
        ends = [min(len(s), d + self.chunk) for s, d in zip(sequences, self.done, strict=True)]
        rows = [(i, d, end) for i, (d, end) in enumerate(zip(self.done, ends, strict=True))]
        rows = [row for row in rows if row[1] < row[2]]
        for seat, start, end in rows:
            self.full.hold(seat, 0, end)
            self.window.hold(seat, max(0, start - WINDOW + 1), end)
            self.done[seat] = end
        starts = np.array([start for _, start, _ in rows], dtype=np.int32)
        asked = AttentionRows(
            seats=np.array([seat for seat, _, _ in rows], dtype=np.int32),
            starts=starts,
            write_starts=starts,
            lengths=np.array([end - start for _, start, end in rows], dtype=np.int32),
            page_table=self.full.table,
            window_page_table=self.window.table,
        )
        parts = [sequences[seat][start:end] for seat, start, end in rows]
        positions = [torch.arange(start, end) for _, start, end in rows]
        with torch.inference_mode():
            self.attention.prepare(asked)
            hidden = self.model.forward(torch.cat(parts), torch.cat(positions), self.attention)
            logits = self.model.head.logits(hidden).split([len(part) for part in parts])
        found = [torch.empty(0, SIZES["vocab_size"])] * len(sequences)
        for (seat, _, _), part in zip(rows, logits, strict=True):
            found[seat] = part
        return found

    def run(self, sequences: list[Tensor]) -> list[Tensor]:
        """Prompts in chunks, then the best token NEW times; logits of every position."""
        sequences = [sequence.clone() for sequence in sequences]
        logits: list[list[Tensor]] = [[] for _ in sequences]
        prompts = [len(sequence) for sequence in sequences]
        while any(len(s) < n + NEW for s, n in zip(sequences, prompts, strict=True)):
            for seat, found in enumerate(self.step(sequences)):
                logits[seat].append(found)
                is_whole = self.done[seat] == len(sequences[seat])
                if is_whole and len(sequences[seat]) < prompts[seat] + NEW:
                    best = found[-1:].argmax(-1)
                    sequences[seat] = torch.cat((sequences[seat], best))
        self.sequences = sequences
        return [torch.cat(parts) for parts in logits]


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, CausalLM, ModelSpec]:
    theirs = random_model(FAMILIES[request.param])
    ours, spec, _ = load(save(theirs, tmp_path_factory.mktemp("windows")))
    assert spec.native
    assert spec.window == WINDOW
    return theirs, ours, spec


@pytest.mark.parametrize(("page_size", "chunk"), list(itertools.product(PAGE_SIZES, CHUNKS)))
def test_pages_of_two_classes_agree_with_transformers(
    family: tuple[Any, CausalLM, ModelSpec], page_size: int, chunk: int
) -> None:
    theirs, ours, spec = family
    stepper = Stepper(ours, spec, page_size, chunk)
    prompts = [tokens(length, seed=seed) for seed, length in enumerate(LENGTHS)]
    found = stepper.run(prompts)
    for prompt, sequence, logits in zip(prompts, stepper.sequences, found, strict=True):
        assert len(sequence) == len(prompt) + NEW
        expected = reference(theirs, sequence).log_softmax(-1)
        ours_too = logits.log_softmax(-1)
        assert len(logits) >= len(sequence) - 1
        difference = (ours_too - expected[: len(logits)]).abs().max().item()
        assert difference <= 1e-4
        # The tokens that were drawn are the best of the reference, where the lead is clear.
        rows = expected[len(prompt) - 1 : len(sequence) - 1]
        lead = rows.topk(2).values.diff().abs()[:, 0]
        chosen = rows.argmax(-1) == sequence[len(prompt) :]
        assert bool((chosen | (lead < 1e-3)).all())
    in_use = sum(len(held) for held in stepper.window.held)
    assert len(stepper.window.free) + in_use == stepper.window.pool.num_pages
