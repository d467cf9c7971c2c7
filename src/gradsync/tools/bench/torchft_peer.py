"""torchft's DiLoCo as a peer, if it is installed: local steps with its own lighthouse, managers and quorums."""

import importlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradsync.tools.bench.peers import MakeOptimizer, NoWrapper, OuterSGD, Peer, Wrapped

__all__ = ["TorchFT"]

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class TorchFT(Peer):
    """Every rank is a replica group of its own, and all of them are needed for a quorum."""

    name: str = "torchft"
    every: int = 16
    needs = "torchft"

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> Wrapped:
        wrapped = NoWrapper().wrap(model, optimizer, window=window)
        local_sgd: Any = importlib.import_module("torchft.local_sgd")
        manager = _manager()
        diloco = local_sgd.DiLoCo(
            manager, [model], wrapped.optimizer, OuterSGD(model.parameters()), sync_every=self.every, pin_memory=False
        )
        diloco.__enter__()
        # Whoever holds the model holds what belongs to it.
        wrapped.flush = lambda: diloco and None
        return wrapped


def _manager() -> Any:
    torchft: Any = importlib.import_module("torchft")
    coordination: Any = importlib.import_module("torchft.coordination")
    rank, ranks, here = dist.get_rank(), dist.get_world_size(), _own_address()
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=ranks) if rank == 0 else None
    told = [None if lighthouse is None else f"http://{here}:{urlsplit(lighthouse.address()).port}"]
    dist.broadcast_object_list(told)
    store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=ranks,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=told[0],
        replica_id=f"rank{rank}",
        hostname=here,
        init_sync=False,
    )
    # They end when nothing holds them.
    manager.belongings = (store, lighthouse)
    return manager


def _own_address() -> str:
    """The address by which other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        address: str = probe.getsockname()[0]
        return address
