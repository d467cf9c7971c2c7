"""The origin of results: the machine, the versions, the commit. No host name, no path."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["commit", "describe_machine", "versions"]

PACKAGES = ("torch", "accelerate", "lightning-fabric", "numpy", "matplotlib")
CPU_KEYS = ("model name", "Model name", "Hardware", "cpu model")
# ARM kernels name no model, only who made the part and its number.
ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd08": "Cortex-A72",
    "0xd03": "Cortex-A53",
}
SOURCE = Path(__file__).resolve().parent


def describe_machine() -> dict[str, str | int | float]:
    """Cores, CPU, memory and kernel."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    values = {key.strip(): value.strip() for key, found, value in (line.partition(":") for line in lines) if found}
    for key in CPU_KEYS:
        if values.get(key):
            return f"{values[key]} ({platform.machine()})"
    part = ARM_PARTS.get(values.get("CPU part", ""))
    return f"ARM {part} ({platform.machine()})" if part else platform.machine()


def versions() -> dict[str, str]:
    """Of Python and of every package whose speed is compared; what is not there says so."""
    found = {"python": platform.python_version()}
    for package in ("gradsync", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """The commit of the source that runs, with ``+`` if it was changed since; ``unknown`` for an installed package."""
    try:
        # An installed package may lie inside someone else's repository.
        _git("ls-files", "--error-unmatch", __file__)
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return answer.stdout.strip()
