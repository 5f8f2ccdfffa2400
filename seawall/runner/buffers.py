"""Every tensor of a step's inputs and outputs, made once.

Two sets of step buffers, used in turn, because a step is planned and loaded while the one before
it may still be on the device:

    StepBuffers   tokens, positions [T]     what the forward reads
                  hidden [seats, H]         the rows that will be sampled; what sampling reads
    SeatTables    page_table [seats, S]     one entry a page of the request that sits there
                  last_token [seats]        the newest sampled token, fed to the next step
                  temperature ... [seats]   how it draws

On the CPU the numpy views below and the tensors are the same memory. The runner is the only
writer.
"""

import numpy as np
import torch
from torch import Tensor

from seawall.core.step import I32, I64, SeatParams, StepPlan
from seawall.device.arena import Arena
from seawall.device.dtypes import torch_dtype
from seawall.memory.footprint import Limits
from seawall.memory.footprint_step import seat_tables, step_tables


class StepBuffers:
    """Inputs of one step's forward and the hidden rows it leaves for sampling."""

    def __init__(self, arena: Arena, limits: Limits, hidden_size: int, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        made = {
            table.name: arena.zeros("step_buffers", table.shape, torch_dtype(table.dtype))
            for table in step_tables(limits, hidden_size, name)
        }
        self.tokens: Tensor = made["tokens"]
        self.positions: Tensor = made["positions"]
        self.hidden: Tensor = made["hidden"]
        self._tokens_host = self.tokens.numpy()
        self._positions_host = self.positions.numpy()

    def load(self, plan: StepPlan, seats: "SeatTables") -> I64:
        """Lay the plan's tokens and positions out; returns each row's offset, int64 [R]."""
        num_tokens = plan.num_tokens
        lengths = plan.lengths.astype(np.int64)
        offsets = np.cumsum(lengths) - lengths
        self._tokens_host[:num_tokens] = plan.token_ids
        fed = plan.from_last
        self._tokens_host[offsets[fed]] = seats.last_token_host[plan.seats[fed]]
        shifts = np.repeat(plan.starts - offsets, lengths)
        self._positions_host[:num_tokens] = np.arange(num_tokens) + shifts
        return offsets


class SeatTables:
    """What the device must know of each running request."""

    def __init__(self, arena: Arena, limits: Limits) -> None:
        made = {
            table.name: arena.zeros("sampler", table.shape, torch_dtype(table.dtype))
            for table in seat_tables(limits)
        }
        self.last_token: Tensor = made["last_token"]
        self.temperature: Tensor = made["temperature"]
        self.top_k: Tensor = made["top_k"]
        self.top_p: Tensor = made["top_p"]
        self.min_p: Tensor = made["min_p"]
        self.seed: Tensor = made["seed"]
        self.params: list[SeatParams | None] = [None] * limits.max_running
        self._page_table: Tensor = made["page_table"]

    @property
    def page_table_host(self) -> I32:
        """int32 [seats, pages_per_seq], the host's view."""
        return self._page_table.numpy()

    @property
    def last_token_host(self) -> I64:
        """int64 [seats], the host's view."""
        return self.last_token.numpy()

    def load(self, plan: StepPlan) -> None:
        """Take over new requests' parameters and changed page table entries."""
        for params in plan.admitted:
            seat = params.seat
            self.params[seat] = params
            self.temperature[seat] = params.temperature
            self.top_k[seat] = params.top_k
            self.top_p[seat] = params.top_p
            self.min_p[seat] = params.min_p
            self.seed[seat] = params.seed
        self.page_table_host[plan.table_seats, plan.table_columns] = plan.table_pages

    def params_of(self, seat: int) -> SeatParams:
        """Parameters of the request in `seat`."""
        params = self.params[seat]
        assert params is not None, f"seat {seat} was never given"
        return params
