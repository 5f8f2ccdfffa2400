"""Random work: prompts of random ids, lengths uniform in a range, the same for the same seed."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and how many tokens each is to be given.

    Attributes:
        prompts: token ids.
        output_lens: tokens to write for each, none fewer.
    """

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def input_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        """Asked for in all."""
        return sum(self.output_lens)


def random_workload(
    *,
    num_requests: int,
    input_range: tuple[int, int],
    output_range: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> Workload:
    """Lengths uniform in the ranges, both ends included; ids uniform over the vocabulary."""
    random = np.random.default_rng(seed)
    input_lens = random.integers(*input_range, size=num_requests, endpoint=True)
    output_lens = random.integers(*output_range, size=num_requests, endpoint=True)
    return Workload(
        prompts=[random.integers(0, vocab_size, size=n).tolist() for n in input_lens],
        output_lens=[int(n) for n in output_lens],
    )


def ratio_range(longest: int, ratio: float, *, least: int) -> tuple[int, int]:
    """[ratio * longest, longest] in whole tokens, at least `least`."""
    return min(max(int(longest * ratio), least), longest), longest
