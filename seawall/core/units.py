"""Sizes in bytes: parsing what users write, printing what plans say, and whole-number rounding.

Everything here is exact: a size is an int, and "1.5GB" is parsed with integers, never with floats.
"""

import re

from seawall.core.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*([a-z]*)")
_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")


def ceil_div(value: int, step: int) -> int:
    """The smallest n with n * step >= value."""
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return ceil_div(value, step) * step


def round_down(value: int, step: int) -> int:
    """The largest multiple of `step` that is at most `value`."""
    return value // step * step


def parse_bytes(value: int | float | str) -> int:
    """Bytes from a number or from text such as "8GiB", "64MiB", "1.5GB" or "4096".

    KB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB powers of 1024, in any case; no
    unit means bytes. A fraction of a byte is dropped.

    Raises:
        ConfigError: negative, not finite, not whole (for a float), or not a size at all.
    """
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"size {value!r} is not a number of bytes; write an int or '8GiB'")
    if isinstance(value, float) and not value.is_integer():
        raise ConfigError(
            f"size {value!r} is not a whole number of bytes; write '1.5GiB' or an int"
        )
    if value < 0:
        raise ConfigError(f"size {value} is negative; the least is 0 bytes")
    return int(value)


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(f"size {text!r} cannot be read; write bytes or a size like '8GiB'")
    whole, fraction, unit = match.group(1), match.group(2) or "", match.group(3)
    factor = _UNITS.get(unit)
    if factor is None:
        raise ConfigError(
            f"size {text!r} has the unknown unit {unit!r}; use B, KB, MB, GB, TB (powers of 1000) "
            "or KiB, MiB, GiB, TiB (powers of 1024)"
        )
    return int(whole + fraction) * factor // int("1" + "0" * len(fraction))


def human_bytes(num_bytes: int) -> str:
    """A short form for people, in powers of 1024: "512 B", "1.50 GiB", "-3.00 MiB"."""
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    step = 0
    while step + 1 < len(_STEPS) and size >= 1024 ** (step + 1):
        step += 1
    if step == 0:
        return f"{sign}{size} B"
    # Hundredths, rounded down: a size is never printed as more than it is.
    hundredths = size * 100 // 1024**step
    return f"{sign}{hundredths // 100}.{hundredths % 100:02d} {_STEPS[step]}"
