"""Hosts with shaped links on one machine, NCCL ranks that share a GPU, and models that take an accelerator's time."""

from gradsync.lab.emulated import EmulatedModel
from gradsync.lab.gpu import SharedGpu, SharedGpuPlan, fork_gpu_ranks
from gradsync.lab.host import Counters, Host, read_counters
from gradsync.lab.lab import Lab, LabPlan, Link, fork_ranks
from gradsync.lab.profile import Layer, Profile, bert_base, resnet50, transformer
from gradsync.lab.rate import Rate
from gradsync.lab.system import LabError

__all__ = [
    "Counters",
    "EmulatedModel",
    "Host",
    "Lab",
    "LabError",
    "LabPlan",
    "Layer",
    "Link",
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
