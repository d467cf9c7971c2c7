"""FSDP2's ``replicate`` with a group of parameters a block, for models whose blocks are called piece by piece.

It synchronizes a group from hooks on the forward of the modules in it. A container whose forward nobody calls would
never be synchronized, and nothing says so; therefore only modules that are called go into groups.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from gradsync.bench.peers import FSDP2Replicate, MakeOptimizer, Wrapped

__all__ = ["GroupedReplicate", "blocks_of_leaves"]

# The modules that are synchronized together, for each group.
Groups = Callable[[nn.Module], Sequence[list[nn.Module]]]
# Of ``blocks.3.mlp.up``: the block.
BLOCK_PARTS = 2


def blocks_of_leaves(model: nn.Module) -> list[list[nn.Module]]:
    """The modules that have parameters of their own, by the block they are in."""
    owners = [
        (name, module) for name, module in model.named_modules() if next(module.parameters(False), None) is not None
    ]
    by_block = itertools.groupby(owners, key=lambda owner: owner[0].split(".")[:BLOCK_PARTS])
    return [[module for _, module in owned] for _, owned in by_block]


@dataclass(frozen=True, kw_only=True)
class GroupedReplicate(FSDP2Replicate):
    """``replicate`` on every group, then on the whole for what is in none."""

    groups: Groups = blocks_of_leaves

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> Wrapped:
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
        for group in self.groups(model):
            replicate(group, mesh=mesh)
        replicated: Any = replicate(model, mesh=mesh)

        @contextmanager
        def no_sync() -> Iterator[None]:
            replicated.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                replicated.set_requires_gradient_sync(True)

        return Wrapped(
            model=replicated,
            optimizer=optimizer(replicated.parameters()),
            backward=lambda loss: (loss / window).backward(),
            no_sync=no_sync,
        )
