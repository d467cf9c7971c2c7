"""Proof that all replicas hold the same parameters."""

import hashlib
from dataclasses import dataclass

import torch
from torch import nn

from gradsync.accelerator.operations import gather_objects
from gradsync.communicator import Communicator

__all__ = ["ReplicaProof", "compare_replicas"]


@dataclass(frozen=True, kw_only=True)
class ReplicaProof:
    """The digests of all ranks' parameters."""

    digests: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return len(set(self.digests)) == 1

    def __str__(self) -> str:
        if len(self.digests) == 1:
            return f"one replica, digest {self.digests[0][:12]}"
        if self.equal:
            return f"all {len(self.digests)} replicas hold the same parameters, digest {self.digests[0][:12]}"
        return "REPLICAS DIFFER: " + ", ".join(f"rank {rank} {each[:12]}" for rank, each in enumerate(self.digests))


def compare_replicas(model: nn.Module, communicator: Communicator) -> ReplicaProof:
    """Every rank digests names and bits of its own parameters; all learn all digests. Collective."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return ReplicaProof(digests=tuple(gather_objects(communicator, [digest.hexdigest()])))
