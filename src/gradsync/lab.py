"""Hosts with shaped links on one machine: see :mod:`gradsync.tools.lab`."""

from gradsync.tools.lab.emulated import EmulatedModel, Layer, Profile, bert_base, resnet50, transformer
from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan, fork_gpu_ranks
from gradsync.tools.lab.host import Counters, Host, read_counters
from gradsync.tools.lab.lab import Lab, LabPlan, LinkState, Rate, fork_ranks
from gradsync.tools.lab.system import LabError

__all__ = [
    "Counters",
    "EmulatedModel",
    "Host",
    "Lab",
    "LabError",
    "LabPlan",
    "Layer",
    "LinkState",
    "Profile",
    "Rate",
    "SharedGpu",
    "SharedGpuPlan",
    "bert_base",
    "fork_gpu_ranks",
    "fork_ranks",
    "read_counters",
    "resnet50",
    "transformer",
]
