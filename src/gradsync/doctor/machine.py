"""Checks of what the machine gives to a process: cores, memory, shared memory, open files."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from gradsync.doctor.finding import GIB, Finding, Status, place_of, size

__all__ = ["check_cores", "check_memory", "check_open_files", "check_shared_memory"]

LEAST_MEMORY = 2 * GIB
# Batches of the workers of a DataLoader pass through it. Docker gives 64 MiB, which a few batches of images fill.
LEAST_SHARED_MEMORY = GIB
# A rank has a few connections to every other one, and a DataLoader sends every tensor as an open file.
FEW_OPEN_FILES, LEAST_OPEN_FILES = 1024, 128

MEMINFO = Path("/proc/meminfo")
SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")


def check_cores(variables: Mapping[str, str]) -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cpu_quota()
    cores = usable if quota is None else min(usable, max(int(quota), 1))
    setting = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    detail = f"{cores} usable"
    if cores < present:
        detail += f" of {present}" + (f" (a container's limit: {quota:g})" if quota is not None else "")
    detail += f"; OMP_NUM_THREADS {setting or 'not set'}"
    if setting and not (setting.isdecimal() and int(setting) > 0):
        fix = "set OMP_NUM_THREADS to the threads of one rank: export OMP_NUM_THREADS=1"
        return Finding(name="cores", status=Status.WARN, detail=f"{detail}, which is no number of threads", fix=fix)
    ranks = place_of(variables).local_world_size
    # What torch takes without a setting is what it has taken here: a thread a core.
    threads = int(setting) if setting else torch.get_num_threads() if ranks > 1 else 1
    if ranks * threads > cores:
        fix = f"ranks that share cores slow each other down: export OMP_NUM_THREADS={max(cores // ranks, 1)}"
        if ranks > cores:
            fix = f"start at most {cores} ranks here, each with OMP_NUM_THREADS=1"
        detail += f"; {ranks} rank{'s' * (ranks > 1)} × {threads} thread{'s' * (threads > 1)}"
        return Finding(name="cores", status=Status.WARN, detail=detail, fix=fix)
    if cores < 2:
        fix = "two ranks on one core take turns; give this process more cores (taskset, docker --cpus, srun -c)"
        return Finding(name="cores", status=Status.WARN, detail=detail, fix=fix)
    return Finding(name="cores", status=Status.PASS, detail=detail)


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container may use."""
    limits = CGROUP / "cpu.max"
    if not limits.exists():
        return None
    allowed, _, period = limits.read_text().strip().partition(" ")
    return None if allowed == "max" else int(allowed) / int(period or 100_000)


def check_memory() -> Finding:
    values = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    total, available = (int(values[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit, used = (_cgroup_bytes(name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit < total:
        total, available = limit, min(available, limit - (used or 0))
    detail = f"{size(available)} available of {size(total)}"
    if available < LEAST_MEMORY:
        fix = "end what fills the memory, or raise the container's limit: every rank holds the whole model"
        return Finding(name="memory", status=Status.WARN, detail=detail, fix=fix)
    return Finding(name="memory", status=Status.PASS, detail=detail)


def _cgroup_bytes(name: str) -> int | None:
    path = CGROUP / name
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) if text.isdecimal() else None


def check_shared_memory() -> Finding:
    name = "shared memory"
    if not SHARED_MEMORY.is_dir():
        fix = "mount -t tmpfs tmpfs /dev/shm (a DataLoader with workers needs it)"
        return Finding(name=name, status=Status.FAIL, detail="/dev/shm does not exist", fix=fix, public="none")
    stats = os.statvfs(SHARED_MEMORY)
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    detail = f"{size(free)} free of {size(total)}"
    if free < LEAST_SHARED_MEMORY:
        fix = "docker run --ipc=host or --shm-size=8g; elsewhere mount -o remount,size=8g /dev/shm. Or do without "
        fix += "workers in the DataLoader"
        return Finding(name=name, status=Status.WARN, detail=detail, fix=fix)
    return Finding(name=name, status=Status.PASS, detail=detail)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_text, hard_text = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    detail = f"{soft_text} a process" + (f" (may be raised to {hard_text})" if hard != soft else "")
    if soft == resource.RLIM_INFINITY or soft >= FEW_OPEN_FILES:
        return Finding(name="open files", status=Status.PASS, detail=detail)
    status = Status.FAIL if soft < LEAST_OPEN_FILES else Status.WARN
    may_be_raised = hard == resource.RLIM_INFINITY or hard >= FEW_OPEN_FILES
    fix = "ulimit -n $(ulimit -Hn)" if may_be_raised else "raise the hard limit: docker --ulimit nofile=65536:65536"
    return Finding(name="open files", status=status, detail=detail, fix=fix)
