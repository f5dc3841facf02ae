"""How much memory this host can still give to stages on its CPU.

It decides nothing about models: it reads what the kernel says, for the machine and for the container that this
process runs in, and takes the smaller amount. It may not import torch: GPUs report their own memory.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_memory_per_stage(stages: int) -> tuple[int, ...]:
    """An equal share of what is available now, for each of `stages` stages on this host."""
    return (available_bytes() // stages,) * stages


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that new processes can use without swapping or running into the container's limit."""
    return min(_machine_bytes(meminfo), _container_bytes(cgroup))


def _machine_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63 - 1


def _container_bytes(cgroup: Path) -> int:
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (cgroup / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return 2**63 - 1
    if limit == "max":
        return 2**63 - 1
    # File pages that nobody used lately are given back before the limit hurts.
    cache = sum(
        int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")
    )
    return max(int(limit) - used + cache, 0)
