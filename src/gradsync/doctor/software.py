"""Checks of what is installed: Python, torch and its backends, GPUs, optional packages, and who started this."""

import importlib
import importlib.metadata
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from gradsync.accelerator.environment import read_environment
from gradsync.doctor.finding import Finding, Status, size
from gradsync.errors import ConfigurationError

__all__ = [
    "check_backends",
    "check_gpus",
    "check_launcher",
    "check_packages",
    "check_python",
    "check_torch",
    "versions",
]

LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 10)
OPTIONAL = ("typer", "rich", "safetensors", "transformers", "accelerate")
NVIDIA_DEVICE = Path("/dev/nvidiactl")
NVIDIA_DRIVER = Path("/sys/module/nvidia/version")


def versions() -> dict[str, str]:
    """What a report about a fault has to begin with."""
    # The package itself is above everything in it, so its own number is asked for by name.
    own: str = importlib.import_module("gradsync").__version__
    return {"gradsync": own, "torch": str(torch.__version__), "python": platform.python_version()}


def check_python() -> Finding:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] >= LEAST_PYTHON:
        return Finding(name="python", status=Status.PASS, detail=detail)
    fix = "gradsync needs Python {}.{} or later".format(*LEAST_PYTHON)
    return Finding(name="python", status=Status.FAIL, detail=detail, fix=fix)


def check_torch() -> Finding:
    version = str(torch.__version__)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= LEAST_TORCH:
        return Finding(name="torch", status=Status.PASS, detail=version)
    fix = "pip install 'torch>={}.{}'".format(*LEAST_TORCH)
    return Finding(name="torch", status=Status.FAIL, detail=version, fix=fix)


def check_backends() -> Finding:
    name = "backends"
    if not dist.is_available():
        fix = "install a torch that has torch.distributed: those from pytorch.org and PyPI do"
        return Finding(name=name, status=Status.FAIL, detail="this torch is built without torch.distributed", fix=fix)
    available = {key: getattr(dist, f"is_{key}_available")() for key in ("gloo", "nccl", "mpi", "ucc")}
    there = ", ".join(key for key, found in available.items() if found) or "none"
    lacking = ", ".join(key for key, found in available.items() if not found)
    detail = f"{there}; not in this torch: {lacking}" if lacking else there
    if not available["gloo"]:
        fix = "install a torch with Gloo, as those from pytorch.org and PyPI are: ranks on CPUs talk through it"
        return Finding(name=name, status=Status.FAIL, detail=detail, fix=fix)
    if torch.cuda.is_available() and not available["nccl"]:
        fix = "install a torch with NCCL: without it the GPUs talk through Gloo, far more slowly"
        return Finding(name=name, status=Status.WARN, detail=detail, fix=fix)
    return Finding(name=name, status=Status.PASS, detail=detail)


def check_gpus() -> Finding:
    if torch.cuda.is_available():
        return _gpus_found()
    if not NVIDIA_DEVICE.exists():
        return Finding(name="gpus", status=Status.PASS, detail="none; ranks compute on the CPU")
    if torch.version.cuda is None and torch.version.hip is None:
        detail = "this machine has an NVIDIA driver, but this torch is built for CPUs only"
        fix = "install a torch with CUDA from https://pytorch.org, or go on with the CPU"
        return Finding(name="gpus", status=Status.WARN, detail=detail, fix=fix)
    detail = f"there is an NVIDIA driver{_driver()}, but torch (CUDA {torch.version.cuda}) finds no GPU it can use"
    fix = "see whether nvidia-smi lists the GPU, whether CUDA_VISIBLE_DEVICES hides it, and whether the driver is new "
    fix += "enough for this CUDA"
    return Finding(name="gpus", status=Status.FAIL, detail=detail, fix=fix)


def _gpus_found() -> Finding:
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = Counter(f"{gpu.name} ({size(gpu.total_memory)})" for gpu in properties)
    names = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    detail = f"{names}; CUDA {torch.version.cuda}{_driver()}"
    if len(kinds) > 1:
        fix = "every step waits for the slowest GPU: train on equal ones, chosen with CUDA_VISIBLE_DEVICES"
        return Finding(name="gpus", status=Status.WARN, detail=detail, fix=fix)
    return Finding(name="gpus", status=Status.PASS, detail=detail)


def _driver() -> str:
    return f", driver {NVIDIA_DRIVER.read_text().strip()}" if NVIDIA_DRIVER.exists() else ""


def check_launcher(variables: Mapping[str, str]) -> Finding:
    try:
        place = read_environment(variables)
    except ConfigurationError as error:
        public = "the launcher's variables make no sense together"
        fix = "see what is left of an older job: env | grep -E 'RANK|WORLD_SIZE|SLURM|PMI|MASTER'"
        return Finding(name="launcher", status=Status.FAIL, detail=str(error), fix=fix, public=public)
    if place.launcher == "none":
        return Finding(name="launcher", status=Status.PASS, detail="none; this process was started by itself")
    nodes = "one node" if place.local_world_size == place.world_size else "several nodes"
    detail = f"{place.launcher}: rank {place.rank} of {place.world_size}, on {nodes}"
    return Finding(name="launcher", status=Status.PASS, detail=detail)


def check_packages() -> Finding:
    """What is not there is no fault: a command that needs it says so."""
    versions = {name: _version(name) for name in OPTIONAL}
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lacking = ", ".join(name for name, version in versions.items() if not version)
    parts = ([there] if there else []) + ([f"not installed: {lacking}"] if lacking else [])
    return Finding(name="packages", status=Status.PASS, detail="; ".join(parts))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
