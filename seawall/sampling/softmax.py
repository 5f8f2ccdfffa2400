"""Running log-sum-exp of a block of rows, merged tile by tile in id order.

Owns: the running state. It is not the exponentials, which its caller makes because it needs them.

Legend: R rows.

Sums within a tile are float32 (at most a few thousand terms, summed pairwise), sums across tiles
float64. A row whose every logit so far is -inf has peak -inf and sum 0.
"""

import torch
from torch import Tensor


class RunningSoftmax:
    """Peak, sum of exponentials and entropy sum of rows seen so far; its caller is its writer.

    Attributes:
        peak: float32 [R] largest logit.
        total: float64 [R] sum of exp(logit - peak).
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.peak = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=device)
        self.total = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self._slope = torch.zeros(num_rows, dtype=torch.float64, device=device)

    @staticmethod
    def shift(peak_R: Tensor) -> Tensor:
        """What to subtract before the exponential: the peak, 0 where it is -inf."""
        return peak_R.masked_fill(peak_R == -torch.inf, 0.0)

    def merge(self, peak_R: Tensor, sums_R: Tensor, slopes_R: Tensor | None = None) -> None:
        """Take in a tile.

        Args:
            peak_R: float32, largest logit of the tile.
            sums_R: float32, sum of exp(d), d = logit - shift(peak).
            slopes_R: float32, sum of d exp(d), for the entropy.
        """
        both = torch.maximum(self.peak, peak_R)
        shift = self.shift(both).double()
        old = self.peak.double().sub_(shift)
        new = peak_R.double().sub_(shift)
        if slopes_R is not None:
            _rescale(self._slope, self.total, old)
            slopes = slopes_R.double()
            _rescale(slopes, sums_R.double(), new)
            self._slope.add_(slopes)
        self.total.mul_(old.exp_()).add_(new.exp_().mul_(sums_R))
        self.peak = both

    def logsumexp(self) -> Tensor:
        """Float64 [R]; NaN where a logit was NaN or no id is allowed."""
        lse = self.total.log().add_(self.peak)
        return lse.masked_fill_(lse.isinf(), torch.nan)

    def entropy(self) -> Tensor:
        """Float64 [R], in nats; needs slopes with every merge."""
        entropy = self.total.log().sub_(self._slope / self.total)
        return entropy.masked_fill_(entropy.isinf(), torch.nan)


def _rescale(slope_R: Tensor, total_R: Tensor, offset_R: Tensor) -> None:
    """Slope sum d exp(d) after each d grew by the offset, which may be -inf for an empty sum."""
    bounded = offset_R.clamp(min=-1e6)  # exp of it is 0 all the same
    slope_R.add_(total_R * bounded).mul_(bounded.exp_())


def subtract_logsumexp(values: Tensor, lse_R: Tensor) -> None:
    """Subtract in place, with the float64 lse split in two so that nothing of it is lost."""
    high = lse_R.float()
    low = lse_R.sub(high).float()
    if values.dim() == 2:
        high, low = high[:, None], low[:, None]
    values.sub_(high).sub_(low)
