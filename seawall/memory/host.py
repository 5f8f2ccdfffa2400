"""What the host says of memory: available bytes under its limits, and this process's resident size.

Reads /proc and the control groups (version 1 and 2); where there is no /proc it falls back to what
the C library knows. The roots are arguments so that tests can lay out their own.
"""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from seawall.core.errors import ConfigError
from seawall.core.units import round_down

MIB = 1 << 20
GIB = 1 << 30

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# Version 1 writes "no limit" as the largest whole number of pages; nothing real is near it.
_NO_LIMIT = 1 << 60


def available_host_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that this process could take without pushing anybody out of memory.

    min(MemAvailable, limit - use) over the process's control group and all groups above it. Use
    leaves out file pages that were not touched lately: the kernel gives those up first.

    Raises:
        ConfigError: the host does not tell.
    """
    candidates = [_meminfo_available(proc / "meminfo")]
    candidates += [max(0, limit - use) for limit, use in _cgroup_limits(proc, cgroups)]
    known = [num_bytes for num_bytes in candidates if num_bytes is not None]
    if not known:
        raise ConfigError("available memory cannot be read on this host; give memory_budget")
    return min(known)


def default_cpu_budget(available: int | None = None) -> int:
    """The device budget on a CPU: min(available / 2, 16 GiB), rounded down to 256 MiB.

    Never less than 256 MiB: whether that is enough is for the plan to say.
    """
    free = available_host_bytes() if available is None else available
    return max(256 * MIB, round_down(min(free // 2, 16 * GIB), 256 * MIB))


def resident_bytes(proc: Path = _PROC) -> int:
    """Resident size of this process; where only its peak is known, that."""
    try:
        pages = int((proc / "self" / "statm").read_text().split()[1])
    except OSError:
        return peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The largest resident size this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _meminfo_available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return _physical_bytes()
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, use) of every group that limits this process."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            yield from _limits_upward(cgroups, group, files)
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_upward(cgroups / "memory", group, files)


def _limits_upward(
    root: Path, group: str, files: tuple[str, str, str]
) -> Iterator[tuple[int, int]]:
    limit_file, use_file, idle_key = files
    folder = root / group.lstrip("/")
    # Inside a container the path may be the host's, of which only the root is mounted.
    while True:
        limit = _read_limit(folder / limit_file)
        use = _read_limit(folder / use_file)
        if limit is not None and use is not None:
            yield limit, max(0, use - _read_stat(folder / "memory.stat", idle_key))
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _read_limit(path: Path) -> int | None:
    """The number in a control file; None for no file and for no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdigit() or int(text) >= _NO_LIMIT:
        return None
    return int(text)


def _read_stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
