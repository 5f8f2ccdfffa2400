"""The pass of the CPU, under the names that every device's pass has; see entry.py.

Owns: nothing but the names. The work is in logprobs.py and sampler.py, the specification.
"""

from seawall.memory.footprint_logits import smallest_workspace as _smallest
from seawall.sampling.logprobs import Ask, score_rows, score_shape
from seawall.sampling.sampler import DrawInput, sample_rows, sample_shape
from seawall.sampling.tiles import LogitsInput

__all__ = ["sample_rows", "score_rows", "smallest_workspace"]


def smallest_workspace(
    source: LogitsInput, ask: Ask | None = None, draw: DrawInput | None = None
) -> int:
    """Fewest bytes that a call which scores or draws can work in."""
    if draw is not None:
        return _smallest(sample_shape(source, draw))
    return _smallest(score_shape(source, ask or Ask()))
