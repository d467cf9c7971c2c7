"""Checks of the software: Python, torch and its backends, GPUs, optional packages, and the launcher."""

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

from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError
from gradsync.tools.doctor.finding import Finding, Status, judged, size

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
    if torch.cuda.is_available():
        return _gpus_found()
    if not NVIDIA_DEVICE.exists():
        return judged("gpus", "none; ranks compute on the CPU")
    if torch.version.cuda is None and torch.version.hip is None:
        detail = "this machine has an NVIDIA driver, but this torch is built for CPUs only"
        fix = "install a torch with CUDA from https://pytorch.org, or go on with the CPU"
        return judged("gpus", detail, (True, Status.WARN, fix))
    detail = f"there is an NVIDIA driver{_driver()}, but torch (CUDA {torch.version.cuda}) finds no GPU it can use"
    fix = "see whether nvidia-smi lists the GPU, whether CUDA_VISIBLE_DEVICES hides it, and whether the driver is new "
    fix += "enough for this CUDA"
    return judged("gpus", detail, (True, Status.FAIL, fix))


def _gpus_found() -> Finding:
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = Counter(f"{gpu.name} ({size(gpu.total_memory)})" for gpu in properties)
    names = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    detail = f"{names}; CUDA {torch.version.cuda}{_driver()}"
    fix = "every step waits for the slowest GPU: train on equal ones, chosen with CUDA_VISIBLE_DEVICES"
    return judged("gpus", detail, (len(kinds) > 1, Status.WARN, fix))


def _driver() -> str:
    return f", driver {NVIDIA_DRIVER.read_text().strip()}" if NVIDIA_DRIVER.exists() else ""


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
    versions = {name: _version(name) for name in OPTIONAL}
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lacking = ", ".join(name for name, version in versions.items() if not version)
    return judged("packages", "; ".join(filter(None, [there, f"not installed: {lacking}" if lacking else ""])))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
