"""Runs a planned step: launch() starts the forward, the flight samples and gives the result.

    launch(plan) -> Flight      inputs sent, forward queued, prompt rows scored
    flight.sample(adjust, masks) tokens drawn, fed to the next step on the device
    flight.wait() -> StepResult numpy, read after the next step has been planned

At most two flights exist, each with one set of step buffers and one transfer. On CUDA launch and
sample only queue work, and `wait` is where the host waits for the device. On the CPU both compute
at once, but the result is still read only after the next plan, so that everything about late rows
happens here as it does on a GPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from seawall.attention.base import AttentionBackend, AttentionRows
from seawall.core.errors import EngineError
from seawall.core.step import LogitAdjust, Scores, StepPlan, StepResult, TokenMasks
from seawall.device.meter import Meter
from seawall.device.runtime import Transfer
from seawall.memory.footprint_cuda import graph_buckets
from seawall.memory.footprint_step import NUM_STEP_SETS
from seawall.models.base import CausalLM
from seawall.runner.asks import drawn_asks, prompt_asks
from seawall.runner.buffers import SeatTables, StepBuffers
from seawall.runner.graphs import DecodeGraphs, Graphs, NoGraphs, padded_rows
from seawall.runner.scoring import Changes, Drawn, Pending, Sampled, Scorer, drawn_only


class Runner:
    """Owns the step buffers and seat tables; the core thread is its only caller."""

    def __init__(
        self,
        *,
        model: CausalLM,
        attention: AttentionBackend,
        scorer: Scorer,
        sets: tuple[StepBuffers, ...],
        transfers: Sequence[Transfer],
        seats: SeatTables,
        meter: Meter,
    ) -> None:
        assert len(sets) == len(transfers) == NUM_STEP_SETS
        self._model = model
        self._attention = attention
        self.scorer = scorer
        self._sets = sets
        self._transfers = transfers
        self.seats = seats
        self.meter = meter
        self._graphs: Graphs = NoGraphs()
        self._most_captured = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "Flight":
        """Compute the step's hidden states; score prompt rows; keep the rows to sample."""
        turn = plan.step % NUM_STEP_SETS
        buffers, transfer = self._sets[turn], self._transfers[turn]
        transfer.begin()
        self.seats.load(plan, transfer)
        offsets = buffers.load(plan, self.seats, transfer)
        with self.meter.scope("activations"):
            bucket = self._graphs.bucket(plan)
            if bucket:
                self._attention.prepare(padded_rows(self._rows(plan), bucket))
                self._graphs.replay(bucket)
                hidden = buffers.hidden[: plan.num_rows]
            else:
                hidden = self._forward(plan, buffers)
                last_rows = transfer.put((offsets + plan.lengths - 1)[plan.samples])
                transfer.send()
                torch.index_select(hidden, 0, last_rows, out=buffers.hidden[: len(last_rows)])
        with self.meter.scope("logits"):
            asks = prompt_asks(plan, offsets, self.seats.notes)
            prompt_scores = self.scorer.score(hidden, asks, transfer)
        return Flight(self, plan, buffers.hidden, prompt_scores, transfer)

    @torch.inference_mode()
    def draw(
        self, flight: "Flight", adjust: LogitAdjust | None, masks: TokenMasks | None
    ) -> "Outcome":
        """Draw the flight's tokens and score them as asked."""
        plan, transfer = flight.plan, flight.transfer
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            transfer.finish()
            return Outcome(rows=rows, drawn=None, scores=(), plain=rows)
        seats = plan.seats[rows].astype(np.int64)
        sampled = Sampled(
            rows=rows,
            seats=seats,
            device_seats=transfer.put(seats),
            device_positions=transfer.put((plan.starts + plan.lengths)[rows].astype(np.int64)),
        )
        with self.meter.scope("logits"):
            changes = Changes(adjust=adjust, mask=self._mask(masks, rows, transfer))
            drawn = self.scorer.draw(flight.hidden, sampled, self.seats, transfer, changes)
            scores, plain = self._output_scores(flight, sampled, drawn.ids, changes)
        transfer.finish()
        return Outcome(rows=rows, drawn=drawn, scores=scores, plain=plain)

    @torch.inference_mode()
    def capture(self, most_rows: int) -> None:
        """Capture the forward of decode steps of up to so many rows.

        All sets of step buffers must be one, since a graph reads and writes fixed places.
        """
        buffers = self._sets[0]
        assert all(other is buffers for other in self._sets)
        nothing = np.empty(0, np.int32)
        windows = self.seats.window_page_table
        empty = AttentionRows(
            seats=nothing,
            starts=nothing,
            write_starts=nothing,
            lengths=nothing,
            page_table=self.seats.page_table.host,
            window_page_table=None if windows is None else windows.host,
        )

        def prepare(num_rows: int) -> None:
            self._attention.prepare(padded_rows(empty, num_rows))

        def forward(num_rows: int) -> None:
            rows = slice(num_rows)
            hidden = self._model.forward(
                buffers.tokens[rows], buffers.positions[rows], self._attention
            )
            buffers.hidden[rows].copy_(hidden)

        self._graphs = DecodeGraphs(graph_buckets(most_rows), prepare, forward)
        self._most_captured = most_rows

    def drop_graphs(self) -> None:
        """Forget captured forwards, before memory that they refer to is given back."""
        self._graphs = NoGraphs()

    def capture_again(self) -> None:
        """Capture what was dropped, if anything ever was captured."""
        if self._most_captured:
            self.capture(self._most_captured)

    def _rows(self, plan: StepPlan) -> AttentionRows:
        windows = self.seats.window_page_table
        return AttentionRows(
            seats=plan.seats,
            starts=plan.starts,
            write_starts=plan.write_starts,
            lengths=plan.lengths,
            page_table=self.seats.page_table.host,
            window_page_table=None if windows is None else windows.host,
        )

    def _forward(self, plan: StepPlan, buffers: StepBuffers) -> Tensor:
        self._attention.prepare(self._rows(plan))
        num_tokens = plan.num_tokens
        return self._model.forward(
            buffers.tokens[:num_tokens], buffers.positions[:num_tokens], self._attention
        )

    def _mask(
        self, masks: TokenMasks | None, rows: np.ndarray, transfer: Transfer
    ) -> Tensor | None:
        """Masks of the sampled rows on the device; None where every token may come."""
        if masks is None or not len(masks.rows):
            return None
        assert self.seats.masks is not None
        at = np.searchsorted(rows, masks.rows)
        return self.seats.masks.load(at, masks.words, len(rows), transfer)

    def _output_scores(
        self, flight: "Flight", sampled: Sampled, ids: Tensor, changes: Changes
    ) -> tuple[tuple[Pending, ...], np.ndarray]:
        """Scores of drawn tokens for the requests that want them.

        The draw itself gives the processed logprob; only raw ones, best tokens and given ids need
        the head once more, for those rows alone. The rows for which the draw is enough come second.
        """
        notes, seats = self.seats.notes, sampled.seats
        wanted, raw = notes.logprobs[seats], notes.raw[seats]
        more = (notes.top_k[seats] > 0) | np.array([bool(notes.token_ids[s]) for s in seats])
        found = []
        for chosen, is_raw in ((wanted & raw, True), (wanted & ~raw & more, False)):
            at = np.flatnonzero(chosen)
            if len(at):
                asks = drawn_asks(at, sampled.rows[at], seats[at], notes, raw=is_raw)
                made = Changes() if is_raw else changes
                found.append(
                    self.scorer.score(flight.hidden, asks, flight.transfer, made, drawn=ids)
                )
        return tuple(found), np.flatnonzero(wanted & ~raw & ~more)


class Outcome:
    """What sampling will leave on the host, once the step's transfer has been waited for."""

    def __init__(
        self,
        *,
        rows: np.ndarray,
        drawn: Drawn | None,
        scores: tuple[Pending, ...],
        plain: np.ndarray,
    ) -> None:
        self._rows = rows
        self._drawn = drawn
        self._scores = scores
        self._plain = plain

    def read(self, plan: StepPlan, prompt_scores: dict[int, Scores]) -> StepResult:
        """The step's result."""
        tokens = np.zeros(plan.num_rows, np.int32)
        failed = np.zeros(plan.num_rows, np.bool_)
        for row, scores in prompt_scores.items():
            failed[row] = not np.isfinite(scores.logprobs).all()
        output_scores: dict[int, Scores] = {}
        if self._drawn is not None:
            logprobs = self._drawn.logprobs()
            tokens[self._rows] = self._drawn.host_ids
            failed[self._rows] |= ~np.isfinite(logprobs)
            for pending in self._scores:
                output_scores |= pending.read()
            for at in self._plain.tolist():
                output_scores[int(self._rows[at])] = drawn_only(logprobs[at : at + 1])
            if len(self._rows) > np.count_nonzero(plan.samples):
                output_scores = {r: s for r, s in output_scores.items() if plan.samples[r]}
        return StepResult(
            step=plan.step,
            tokens=tokens,
            failed=failed,
            prompt_scores=prompt_scores,
            output_scores=output_scores,
        )


class Flight:
    """One step between launch and result. Holds its buffer set's rows and host arrays only."""

    def __init__(
        self,
        runner: Runner,
        plan: StepPlan,
        hidden: Tensor,
        prompt_scores: Pending,
        transfer: Transfer,
    ) -> None:
        self.plan = plan
        self.hidden = hidden
        self.transfer = transfer
        self._prompt_scores = prompt_scores
        self._runner = runner
        self._outcome: Outcome | None = None

    def sample(self, adjust: LogitAdjust | None, masks: TokenMasks | None) -> None:
        """Draw this step's tokens; every earlier step's result must have been taken."""
        self._outcome = self._runner.draw(self, adjust, masks)
        if masks is not None and len(masks.late):
            # What was drawn without a mask is nobody's: no result holds it, no step reads it.
            self.plan = self.plan.without_draws(masks.late)

    def wait(self) -> StepResult:
        """The step's result, on the host."""
        if self._outcome is None:
            raise EngineError(f"step {self.plan.step}: waited for before it was sampled")
        self.transfer.wait()
        return self._outcome.read(self.plan, self._prompt_scores.read())
