"""Seeds: one 64-bit number a sample, mixed so that neighbours share nothing.

The draw at a position depends on (sample seed, position, token id) alone; this module makes the
sample seed. Mixing is the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

_MASK = (1 << 64) - 1


def mix_seed(seed: int, sample_index: int) -> int:
    """Seed of sample `sample_index` of a request with `seed`; a signed 64-bit integer."""
    value = (_finalise(seed & _MASK) + (sample_index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = _finalise(value)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
