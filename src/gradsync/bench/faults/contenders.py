"""Those who are compared: how they wrap a model, and what their ranks find in the environment.

*Stock* is what a script has that follows the tutorials. *Tuned* is what torch offers against the same faults: a store
for every life of the ranks, without which those that torchrun starts again take the addresses of the dead ones from it;
a monitored barrier before every backward, which names the ranks that do not come; and a look at the gradients' norm
before every step, which raises where it is not finite. (``TORCH_DISTRIBUTED_DEBUG=DETAIL`` would name ranks, too, but
torch 2.13's wrapper crashes under it, here at least.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor, nn

from gradsync.bench.peers import DDP, OURS, TUNED, Accelerate, MakeOptimizer, Peer, Wrapped
from gradsync.data_parallel import DistributedDataParallel
from gradsync.engine import Fingerprints

__all__ = ["AGAINST_FAULTS", "CONTENDERS", "FINGERPRINTS_EVERY", "Contender"]

FINGERPRINTS_EVERY = 5
# Less than a group has for a collective, so that the barrier speaks first.
MONITORED = timedelta(seconds=8)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of them, with the ``variables`` of its ranks."""

    peer: Peer
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Guarded(Peer):
    """gradsync's wrapper, with what it has against wrong numbers switched on."""

    name: str = OURS

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> Wrapped:
        fingerprints = Fingerprints(every=FINGERPRINTS_EVERY, on_difference="heal-from-majority")
        wrapper = DistributedDataParallel(model, on_veto="skip-window", fingerprints=fingerprints)
        return Wrapped(
            model=wrapper,
            optimizer=optimizer(wrapper.parameters()),
            backward=lambda loss: loss.backward(),
            no_sync=wrapper.no_sync,
        )


@dataclass(frozen=True, kw_only=True)
class _Checked(Peer):
    """torch's wrapper, no backward without all ranks, and no step with a gradient that is not finite."""

    name: str = TUNED

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> Wrapped:
        wrapped = DDP().wrap(model, optimizer, window=window)
        backward = wrapped.backward

        def checked(loss: Tensor) -> None:
            dist.monitored_barrier(timeout=MONITORED, wait_all_ranks=True)
            backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), math.inf, error_if_nonfinite=True)

        wrapped.backward = checked
        return wrapped


AGAINST_FAULTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
CONTENDERS = {
    each.peer.name: each
    for each in (
        Contender(peer=_Guarded()),
        Contender(peer=DDP()),
        Contender(peer=_Checked(), variables=AGAINST_FAULTS),
        Contender(peer=Accelerate()),
    )
}
