"""Checks of the resources that a process gets: cores, memory, shared memory, open files."""

import math
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from gradsync.tools.doctor.finding import GIB, Finding, Status, judged, place_of, size

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
        return judged("cores", f"{detail}, which is no number of threads", (True, Status.WARN, fix))
    ranks = place_of(variables).local_world_size
    # What torch takes without a setting is what it has taken here: a thread a core.
    threads = int(setting) if setting else torch.get_num_threads() if ranks > 1 else 1
    crowded = ranks * threads > cores
    if crowded:
        detail += f"; {ranks} rank{'s' * (ranks > 1)} × {threads} thread{'s' * (threads > 1)}"
    few = f"start at most {cores} ranks here, each with OMP_NUM_THREADS=1"
    narrow = f"ranks that share cores slow each other down: export OMP_NUM_THREADS={max(cores // ranks, 1)}"
    more = "two ranks on one core take turns; give this process more cores (taskset, docker --cpus, srun -c)"
    faults = [(ranks > cores, few), (crowded, narrow), (cores < 2, more)]
    return judged("cores", detail, *((there, Status.WARN, fix) for there, fix in faults))


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
    fix = "end what fills the memory, or raise the container's limit: every rank holds the whole model"
    return judged("memory", detail, (available < LEAST_MEMORY, Status.WARN, fix))


def _cgroup_bytes(name: str) -> int | None:
    path = CGROUP / name
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) if text.isdecimal() else None


def check_shared_memory() -> Finding:
    name = "shared memory"
    if not SHARED_MEMORY.is_dir():
        fix = "mount -t tmpfs tmpfs /dev/shm (a DataLoader with workers needs it)"
        return judged(name, "/dev/shm does not exist", (True, Status.FAIL, fix), public="none")
    stats = os.statvfs(SHARED_MEMORY)
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    detail = f"{size(free)} free of {size(total)}"
    fix = (
        "docker run --ipc=host or --shm-size=8g; elsewhere mount -o remount,size=8g /dev/shm. Or do without workers in "
    )
    fix += "the DataLoader"
    return judged(name, detail, (free < LEAST_SHARED_MEMORY, Status.WARN, fix))


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_text, hard_text = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    detail = f"{soft_text} a process" + (f" (may be raised to {hard_text})" if hard != soft else "")
    allowed, most = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    fix = (
        "raise the hard limit: docker --ulimit nofile=65536:65536"
        if most < FEW_OPEN_FILES
        else "ulimit -n $(ulimit -Hn)"
    )
    faults = [(allowed < LEAST_OPEN_FILES, Status.FAIL, fix), (allowed < FEW_OPEN_FILES, Status.WARN, fix)]
    return judged("open files", detail, *faults)
