"""Runs a planned step: launch() computes the forward, the flight samples and gives the result.

    launch(plan) -> Flight      inputs laid out, forward done, prompt rows scored
    flight.sample(adjust)       tokens drawn, fed to the next step on the device
    flight.wait() -> StepResult numpy, read after the next step has been planned

At most two flights exist, each with one set of step buffers; a flight holds no other tensor. On
the CPU launch computes at once, but the result is still read only after the next plan, so that
everything about late rows happens here as it does on a GPU.
"""

import numpy as np
import torch
from torch import Tensor

from seawall.attention.base import AttentionBackend, AttentionRows
from seawall.core.errors import EngineError
from seawall.core.step import I64, LogitAdjust, Scores, StepPlan, StepResult
from seawall.device.meter import Meter
from seawall.memory.footprint_step import NUM_STEP_SETS
from seawall.models.base import CausalLM
from seawall.runner.buffers import SeatTables, StepBuffers
from seawall.runner.scoring import Ask, Scorer


class Runner:
    """Owns the step buffers and seat tables; the core thread is its only caller."""

    def __init__(
        self,
        *,
        model: CausalLM,
        attention: AttentionBackend,
        scorer: Scorer,
        sets: tuple[StepBuffers, ...],
        seats: SeatTables,
        meter: Meter,
    ) -> None:
        assert len(sets) == NUM_STEP_SETS
        self._model = model
        self._attention = attention
        self.scorer = scorer
        self._sets = sets
        self.seats = seats
        self.meter = meter

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "Flight":
        """Compute the step's hidden states; score prompt rows; keep the rows to sample."""
        buffers = self._sets[plan.step % NUM_STEP_SETS]
        self.seats.load(plan)
        offsets = buffers.load(plan, self.seats)
        with self.meter.scope("activations"):
            hidden = self._forward(plan, buffers)
            last_rows = (offsets + plan.lengths - 1)[plan.samples]
            torch.index_select(
                hidden, 0, torch.from_numpy(last_rows), out=buffers.hidden[: len(last_rows)]
            )
        with self.meter.scope("logits"):
            prompt_scores = self.scorer.score(hidden, self._prompt_asks(plan, offsets))
        return Flight(self, plan, buffers.hidden, prompt_scores)

    @torch.inference_mode()
    def draw(self, flight: "Flight", adjust: LogitAdjust | None) -> StepResult:
        """Draw the flight's tokens and score them as asked."""
        plan = flight.plan
        rows = np.flatnonzero(plan.samples)
        tokens = np.zeros(plan.num_rows, np.int32)
        failed = np.zeros(plan.num_rows, np.bool_)
        for row, scores in flight.prompt_scores.items():
            failed[row] = np.isnan(scores.logprobs).any()
        output_scores: dict[int, Scores] = {}
        if len(rows):
            seats = plan.seats[rows].astype(np.int64)
            positions = (plan.starts + plan.lengths)[rows].astype(np.int64)
            with self.meter.scope("logits"):
                ids, logprobs = self.scorer.draw(
                    flight.hidden, rows, seats, positions, self.seats, adjust
                )
                output_scores = self._output_scores(
                    flight.hidden, rows, seats, ids, logprobs, adjust
                )
            self.seats.last_token_host[seats] = ids
            tokens[rows] = ids
            failed[rows] |= ~np.isfinite(logprobs)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            failed=failed,
            prompt_scores=flight.prompt_scores,
            output_scores=output_scores,
        )

    def _forward(self, plan: StepPlan, buffers: StepBuffers) -> Tensor:
        self._attention.prepare(
            AttentionRows(
                seats=plan.seats,
                starts=plan.starts,
                write_starts=plan.write_starts,
                lengths=plan.lengths,
                page_table=self.seats.page_table_host,
            )
        )
        num_tokens = plan.num_tokens
        return self._model.forward(
            buffers.tokens[:num_tokens], buffers.positions[:num_tokens], self._attention
        )

    def _prompt_asks(self, plan: StepPlan, offsets: I64) -> list[Ask]:
        """One ask for each row that has prompt positions to score."""
        asks: list[Ask] = []
        end = 0
        for i in np.flatnonzero(plan.score_ends > plan.score_starts):
            count = int(plan.score_ends[i] - plan.score_starts[i])
            start, end = end, end + count
            first = int(offsets[i] + plan.score_starts[i] - plan.starts[i])
            params = self.seats.params_of(int(plan.seats[i]))
            asks.append(
                Ask(
                    row=int(i),
                    rows=np.arange(first, first + count),
                    targets=plan.score_targets[start:end].astype(np.int64),
                    top_k=params.logprob_top_k,
                    token_ids=params.logprob_token_ids,
                    temperature=params.prompt_temperature,
                )
            )
        return asks

    def _output_scores(
        self,
        hidden: Tensor,
        rows: I64,
        seats: I64,
        ids: I64,
        logprobs: np.ndarray,
        adjust: LogitAdjust | None,
    ) -> dict[int, Scores]:
        """Scores of drawn tokens for the requests that want them.

        The draw itself gives the processed logprob; only raw ones, best tokens and given ids need
        the head once more, for those rows alone.
        """
        found: dict[int, Scores] = {}
        raw: list[Ask] = []
        processed: list[Ask] = []
        for at, (row, seat) in enumerate(zip(rows, seats, strict=True)):
            params = self.seats.params_of(int(seat))
            if not params.logprobs:
                continue
            ask = Ask(
                row=int(row),
                rows=np.array([at]),
                targets=ids[at : at + 1],
                top_k=params.logprob_top_k,
                token_ids=params.logprob_token_ids,
                temperature=1.0 if params.raw_logprobs else params.temperature or 1.0,
            )
            if params.raw_logprobs:
                raw.append(ask)
            elif ask.top_k or ask.token_ids:
                processed.append(ask)
            else:
                found[ask.row] = _drawn_only(logprobs[at : at + 1])
        found |= self.scorer.score(hidden, raw)
        found |= self.scorer.score(hidden, processed, adjust)
        return found


class Flight:
    """One step between launch and result. Holds its buffer set's rows and host arrays only."""

    def __init__(
        self, runner: Runner, plan: StepPlan, hidden: Tensor, prompt_scores: dict[int, Scores]
    ) -> None:
        self.plan = plan
        self.hidden = hidden
        self.prompt_scores = prompt_scores
        self._runner = runner
        self._result: StepResult | None = None

    def sample(self, adjust: LogitAdjust | None) -> None:
        """Draw this step's tokens; every earlier step's result must have been taken."""
        self._result = self._runner.draw(self, adjust)

    def wait(self) -> StepResult:
        """The step's result, on the host."""
        if self._result is None:
            raise EngineError(f"step {self.plan.step}: waited for before it was sampled")
        return self._result


def _drawn_only(logprobs: np.ndarray) -> Scores:
    return Scores(
        logprobs=logprobs.copy(),
        top_ids=np.empty((1, 0), np.int64),
        top_logprobs=np.empty((1, 0), np.float32),
        token_logprobs=np.empty((1, 0), np.float32),
    )
