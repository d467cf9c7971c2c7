"""Findings of the doctor, and its checks of the software and of the resources a process gets."""

import importlib
import importlib.metadata
import math
import os
import platform
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist

from gradsync.base.environment import ProcessEnvironment, read_environment
from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.numbers import count, size

__all__ = [
    *("GIB", "KIB", "MIB", "Finding", "Status", "guarded", "judged", "place_of", "versions"),
    *("check_backends", "check_cores", "check_gpus", "check_launcher", "check_memory", "check_open_files"),
    *("check_packages", "check_python", "check_shared_memory", "check_torch"),
]

KIB, MIB, GIB = 2**10, 2**20, 2**30
LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 10)
OPTIONAL = ("typer", "rich", "safetensors", "transformers", "accelerate")
NVIDIA_DEVICE = Path("/dev/nvidiactl")
NVIDIA_DRIVER = Path("/sys/module/nvidia/version")
LEAST_MEMORY = 2 * GIB
# Batches of the workers of a DataLoader pass through it. Docker gives 64 MiB, which a few batches of images fill.
LEAST_SHARED_MEMORY = GIB
# A rank has a few connections to every other one, and a DataLoader sends every tensor as an open file.
FEW_OPEN_FILES, LEAST_OPEN_FILES = 1024, 128

MEMINFO = Path("/proc/meminfo")
SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")


class Status(StrEnum):
    """FAIL: training does not work. WARN: it does, but slowly, or not everywhere."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's table.

    ``fix`` is what to do, empty if nothing is to be done. ``public`` stands for ``detail`` in a bug report, where
    ``detail`` has host names, addresses or paths.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""
    public: str | None = None

    @property
    def public_detail(self) -> str:
        return self.detail if self.public is None else self.public


# Whether something is wrong, how bad that is, and what to do about it.
Fault = tuple[bool, Status, str]


def judged(name: str, detail: str, *faults: Fault, public: str | None = None) -> Finding:
    """What the first of ``faults`` that is there makes of ``detail``; PASS, if none is."""
    status, fix = next(((status, fix) for there, status, fix in faults if there), (Status.PASS, ""))
    return Finding(name=name, status=status, detail=detail, fix=fix, public=public)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """What ``check`` finds. A check that breaks must not keep the others from being made, and is itself a finding."""
    try:
        return check()
    except Exception as error:
        public = f"the check itself failed: {type(error).__name__}"
        fix = "please report this with the block below"
        return Finding(name=name, status=Status.FAIL, detail=f"{public}: {error}", fix=fix, public=public)


def place_of(variables: Mapping[str, str]) -> ProcessEnvironment:
    """Who this process is; alone, where the variables make no sense: the check of the launcher says what is wrong."""
    try:
        return read_environment(variables)
    except ConfigurationError:
        return ProcessEnvironment()


# -- software ---------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What a report about a fault has to begin with."""
    # The package itself is above everything in it, so its own number is asked for by name.
    own: str = importlib.import_module("gradsync").__version__
    return {"gradsync": own, "torch": str(torch.__version__), "python": platform.python_version()}


def check_python() -> Finding:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    fix = "gradsync needs Python {}.{} or later".format(*LEAST_PYTHON)
    return judged("python", detail, (sys.version_info[:2] < LEAST_PYTHON, Status.FAIL, fix))


def check_torch() -> Finding:
    version = str(torch.__version__)
    old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < LEAST_TORCH
    return judged("torch", version, (old, Status.FAIL, "pip install 'torch>={}.{}'".format(*LEAST_TORCH)))


def check_backends() -> Finding:
    if not dist.is_available():
        fix = "install a torch that has torch.distributed: those from pytorch.org and PyPI do"
        return judged("backends", "this torch is built without torch.distributed", (True, Status.FAIL, fix))
    available = {key: getattr(dist, f"is_{key}_available")() for key in ("gloo", "nccl", "mpi", "ucc")}
    there = ", ".join(key for key, found in available.items() if found) or "none"
    lacking = ", ".join(key for key, found in available.items() if not found)
    detail = f"{there}; not in this torch: {lacking}" if lacking else there
    gloo = "install a torch with Gloo, as those from pytorch.org and PyPI are: ranks on CPUs talk through it"
    nccl = "install a torch with NCCL: without it the GPUs talk through Gloo, far more slowly"
    slow = torch.cuda.is_available() and not available["nccl"]
    return judged("backends", detail, (not available["gloo"], Status.FAIL, gloo), (slow, Status.WARN, nccl))


def check_gpus() -> Finding:
    driver = f", driver {NVIDIA_DRIVER.read_text().strip()}" if NVIDIA_DRIVER.exists() else ""
    if torch.cuda.is_available():
        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        kinds = Counter(f"{gpu.name} ({size(gpu.total_memory)})" for gpu in properties)
        names = ", ".join(f"{number} × {kind}" for kind, number in kinds.items())
        fix = "every step waits for the slowest GPU: train on equal ones, chosen with CUDA_VISIBLE_DEVICES"
        return judged("gpus", f"{names}; CUDA {torch.version.cuda}{driver}", (len(kinds) > 1, Status.WARN, fix))
    if not NVIDIA_DEVICE.exists():
        return judged("gpus", "none; ranks compute on the CPU")
    if torch.version.cuda is None and torch.version.hip is None:
        detail = "this machine has an NVIDIA driver, but this torch is built for CPUs only"
        fix = "install a torch with CUDA from https://pytorch.org, or go on with the CPU"
        return judged("gpus", detail, (True, Status.WARN, fix))
    detail = f"there is an NVIDIA driver{driver}, but torch (CUDA {torch.version.cuda}) finds no GPU it can use"
    fix = "see whether nvidia-smi lists the GPU, whether CUDA_VISIBLE_DEVICES hides it, and whether the driver is new "
    fix += "enough for this CUDA"
    return judged("gpus", detail, (True, Status.FAIL, fix))


def check_launcher(variables: Mapping[str, str]) -> Finding:
    try:
        place = read_environment(variables)
    except ConfigurationError as error:
        public = "the launcher's variables make no sense together"
        fix = "see what is left of an older job: env | grep -E 'RANK|WORLD_SIZE|SLURM|PMI|MASTER'"
        return judged("launcher", str(error), (True, Status.FAIL, fix), public=public)
    if place.launcher == "none":
        return judged("launcher", "none; this process was started by itself")
    nodes = "one node" if place.local_world_size == place.world_size else "several nodes"
    return judged("launcher", f"{place.launcher}: rank {place.rank} of {place.world_size}, on {nodes}")


def check_packages() -> Finding:
    """What is not there is no fault: a command that needs it says so."""
    there, lacking = [], []
    for name in OPTIONAL:
        try:
            there.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lacking.append(name)
    words = [", ".join(there), f"not installed: {', '.join(lacking)}" if lacking else ""]
    return judged("packages", "; ".join(filter(None, words)))


# -- resources --------------------------------------------------------------------------------------------------------


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
        detail += f"; {count(ranks, 'rank')} × {count(threads, 'thread')}"
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
    fix = "docker run --ipc=host or --shm-size=8g; elsewhere mount -o remount,size=8g /dev/shm. Or do without workers "
    fix += "in the DataLoader"
    return judged(name, detail, (free < LEAST_SHARED_MEMORY, Status.WARN, fix))


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_text, hard_text = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    detail = f"{soft_text} a process" + (f" (may be raised to {hard_text})" if hard != soft else "")
    allowed, most = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    harder = "raise the hard limit: docker --ulimit nofile=65536:65536"
    fix = harder if most < FEW_OPEN_FILES else "ulimit -n $(ulimit -Hn)"
    faults = [(allowed < LEAST_OPEN_FILES, Status.FAIL, fix), (allowed < FEW_OPEN_FILES, Status.WARN, fix)]
    return judged("open files", detail, *faults)
