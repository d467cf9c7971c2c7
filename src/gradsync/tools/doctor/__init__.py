"""Checks whether this machine is fit for data-parallel training: :func:`examine` runs all checks.

One function per check; each returns a :class:`Finding` and changes nothing.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist

from gradsync.tools.doctor import checks, network
from gradsync.tools.doctor.checks import Finding, Status, guarded
from gradsync.tools.lab.gpu import SharedGpuPlan

__all__ = ["Finding", "Status", "examine"]


def examine(
    *,
    timeout: float = 8.0,
    sharing: SharedGpuPlan | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Finding]:
    """Run all checks, in the order of the table.

    ``timeout``: seconds for each measurement of a link. ``sharing``: how the ranks of NCCL share a GPU, if they do.
    """
    with ExitStack() as stack:
        # First of all, since the processes need seconds to import torch; the other checks fill that time.
        shared = {"nccl": sharing}
        links = [network.LinkTest(*each, timeout, stack, shared.get(each[0])) for each in _backends(sharing)]
        findings = [guarded(name, check) for name, check in _checks(os.environ).items()]
        for link in links:
            progress(f"measuring the {link.name}")
            findings.append(guarded(link.name, link.finding))
    return findings


def _checks(variables: Mapping[str, str]) -> dict[str, Callable[[], Finding]]:
    return {
        "python": checks.check_python,
        "torch": checks.check_torch,
        "backends": checks.check_backends,
        "packages": checks.check_packages,
        "launcher": partial(checks.check_launcher, variables),
        "gpus": checks.check_gpus,
        "cores": partial(checks.check_cores, variables),
        "memory": checks.check_memory,
        "shared memory": checks.check_shared_memory,
        "open files": checks.check_open_files,
        "interfaces": lambda: network.check_interfaces(network.list_interfaces()),
        "gloo": lambda: network.check_gloo_interface(network.list_interfaces(), variables),
        "ports": network.check_ports,
    }


def _backends(sharing: SharedGpuPlan | None = None) -> list[tuple[str, int]]:
    """Backends that can be tried here, with the number of ranks."""
    backends = []
    if dist.is_available() and dist.is_gloo_available():
        backends.append(("gloo", 2))
    if torch.cuda.is_available() and dist.is_nccl_available():
        backends.append(("nccl", torch.cuda.device_count() if sharing is None else sharing.ranks))
    return backends
