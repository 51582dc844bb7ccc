"""Memory of the host that is still free."""

from __future__ import annotations

from pathlib import Path


def host_available_bytes() -> int | None:
    """Host memory that may still be taken, by the kernel's and the container's word."""
    known = []
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            known.append(int(fields["MemAvailable"].split()[0]) << 10)
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        known.append(int(limit.read_text()) - int(used.read_text()))
    return min(known, default=None)
