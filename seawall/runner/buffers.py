"""Every tensor of a step's inputs and outputs, made once.

Two sets of step buffers, used in turn, because a step is planned and loaded while the one before
it may still be on the device:

    StepBuffers   tokens, positions [T]     what the forward reads
                  hidden [seats, H]         the rows that will be sampled; what sampling reads
    SeatTables    page_table [seats, S]     one entry a page of the request that sits there
                  window_page_table         the same for layers with a window, if there are any
                  last_token [seats]        the newest sampled token, fed to the next step
                  temperature ... [seats]   how it draws
    MaskTable     words [seats, W]          which tokens a step's sampled rows may draw
    SeatNotes     numpy                     what the host must know of a seat to ask for scores

What changes goes up through the step's Transfer; nothing is read back. The runner is the only
writer.
"""

import numpy as np
import torch
from torch import Tensor

from seawall.core.step import I32, I64, SeatParams, StepPlan
from seawall.device.arena import Arena
from seawall.device.dtypes import torch_dtype
from seawall.device.runtime import Transfer
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

    def load(self, plan: StepPlan, seats: "SeatTables", transfer: Transfer) -> I64:
        """Lay the plan's tokens and positions out; returns each row's offset, int64 [R]."""
        num_tokens = plan.num_tokens
        lengths = plan.lengths.astype(np.int64)
        offsets = np.cumsum(lengths) - lengths
        shifts = np.repeat(plan.starts - offsets, lengths)
        tokens = transfer.put(plan.token_ids)
        positions = transfer.put(np.arange(num_tokens) + shifts)
        fed = plan.from_last
        fed_tokens = transfer.put(offsets[fed])
        fed_seats = transfer.put(plan.seats[fed].astype(np.int64))
        transfer.send()
        self.tokens[:num_tokens].copy_(tokens)
        self.positions[:num_tokens].copy_(positions)
        if len(fed_seats):
            newest = seats.last_token.index_select(0, fed_seats)
            self.tokens.index_copy_(0, fed_tokens, newest)
        return offsets


class SeatNotes:
    """What requests asked for, by seat, where the host can look it up for many at once."""

    def __init__(self, num_seats: int) -> None:
        self.logprobs = np.zeros(num_seats, np.bool_)
        self.raw = np.zeros(num_seats, np.bool_)
        self.filtered = np.zeros(num_seats, np.bool_)
        self.temperature = np.zeros(num_seats, np.float32)
        self.prompt_temperature = np.ones(num_seats, np.float32)
        self.top_k = np.zeros(num_seats, np.int64)
        self.token_ids: list[tuple[int, ...]] = [()] * num_seats

    def take(self, params: SeatParams) -> None:
        """A request was given its seat."""
        seat = params.seat
        self.logprobs[seat] = params.logprobs
        self.raw[seat] = params.raw_logprobs
        cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        # A greedy draw takes the best id, which no filter removes.
        self.filtered[seat] = cut and params.temperature > 0.0
        self.temperature[seat] = params.temperature
        self.prompt_temperature[seat] = params.prompt_temperature
        self.top_k[seat] = params.logprob_top_k
        self.token_ids[seat] = params.logprob_token_ids


class PageTable:
    """Pages by seat and column: column c covers positions [c * page_size, (c + 1) * page_size).

    `table` is int32 [seats, pages_per_seq] on the device, `host` the host's view of it.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        # On the CPU the host's view is the table itself.
        self._shared = table.device.type == "cpu"
        self.host: I32 = table.numpy() if self._shared else np.zeros(table.shape, np.int32)

    def set(self, seats: I32, columns: I32, pages: I32, transfer: Transfer) -> None:
        """Take over changed entries."""
        self.host[seats, columns] = pages
        if self._shared or not len(pages):
            return
        entries = seats.astype(np.int64) * self.host.shape[1] + columns
        places, values = transfer.put(entries), transfer.put(pages)
        transfer.send()
        self.table.view(-1).index_copy_(0, places, values)


class MaskTable:
    """Which tokens each sampled row of a step may draw: int32 [seats, ceil(V / 32)]."""

    def __init__(self, arena: Arena, num_seats: int, num_words: int) -> None:
        self._words: Tensor = arena.zeros("masks", (num_seats, num_words), torch.int32)

    def load(self, at: I64, words: I32, num_rows: int, transfer: Transfer) -> Tensor:
        """Masks of `num_rows` sampled rows: `words` at the places `at`, all tokens elsewhere."""
        places, given = transfer.put(at), transfer.put(words)
        transfer.send()
        return self._words[:num_rows].fill_(-1).index_copy_(0, places, given)


class SeatTables:
    """What the device must know of each running request."""

    def __init__(
        self, arena: Arena, limits: Limits, *, windows: bool = False, mask_words: int = 0
    ) -> None:
        made = {
            table.name: arena.zeros("sampler", table.shape, torch_dtype(table.dtype))
            for table in seat_tables(limits, windows=windows)
        }
        self.last_token: Tensor = made["last_token"]
        self.temperature: Tensor = made["temperature"]
        self.top_k: Tensor = made["top_k"]
        self.top_p: Tensor = made["top_p"]
        self.min_p: Tensor = made["min_p"]
        self.seed: Tensor = made["seed"]
        self.page_table = PageTable(made["page_table"])
        self.window_page_table = PageTable(made["window_page_table"]) if windows else None
        self.notes = SeatNotes(limits.max_running)
        self.masks = MaskTable(arena, limits.max_running, mask_words) if mask_words else None

    def load(self, plan: StepPlan, transfer: Transfer) -> None:
        """Take over new requests' parameters and changed page table entries."""
        self.page_table.set(plan.table_seats, plan.table_columns, plan.table_pages, transfer)
        if self.window_page_table is not None:
            self.window_page_table.set(
                plan.window_seats, plan.window_columns, plan.window_pages, transfer
            )
        if plan.admitted:
            self._admit(plan.admitted, transfer)

    def _admit(self, admitted: tuple[SeatParams, ...], transfer: Transfer) -> None:
        for params in admitted:
            self.notes.take(params)
        seats = transfer.put(np.array([p.seat for p in admitted], np.int64))
        changed = (
            (self.temperature, np.array([p.temperature for p in admitted], np.float32)),
            (self.top_k, np.array([p.top_k for p in admitted], np.int64)),
            (self.top_p, np.array([p.top_p for p in admitted], np.float32)),
            (self.min_p, np.array([p.min_p for p in admitted], np.float32)),
            (self.seed, np.array([p.seed for p in admitted], np.int64)),
        )
        put = [(table, transfer.put(values)) for table, values in changed]
        transfer.send()
        for table, values in put:
            table.index_copy_(0, seats, values)
