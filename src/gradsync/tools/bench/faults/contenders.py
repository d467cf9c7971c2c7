"""The setups compared: how each wraps a model, what starts its ranks, and which environment they get.

*Stock* is a script that follows the tutorials. *Tuned* is what torch offers against the same faults: a new store for
every restart of the ranks, without which ranks that torchrun restarts read the addresses of the dead ones from it; a
monitored barrier before every backward, which names the ranks that do not arrive; and a check of the gradients' norm
before every step, which raises if it is not finite. (``TORCH_DISTRIBUTED_DEBUG=DETAIL`` would name ranks, too, but
torch 2.13's wrapper crashes under it, here at least.) *Elastic* are setups whose ranks continue without a lost one:
torchft's own wrapper, and ``Accelerator(elastic=…)``.
"""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor, nn

from gradsync.core.engine import Fingerprints
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.tools.bench.faults.cases import CUT_LINK
from gradsync.tools.bench.faults.judging import RANKS, ElasticJudge, Judge
from gradsync.tools.bench.peers import DDP, OURS, TUNED, Accelerate, MakeOptimizer, Peer, Wrapped

__all__ = [
    "AGAINST_FAULTS",
    "CONTENDERS",
    "ELASTIC",
    "ELASTIC_PROGRAM",
    "FINGERPRINTS_EVERY",
    "MONITORED",
    "PROGRAM",
    "REPLICA",
    "RESTARTS",
    "TORCHFT",
    "WRAPPERS",
    "Contender",
]

ELASTIC, TORCHFT = "gradsync elastic", "torchft"
PROGRAM, ELASTIC_PROGRAM = "gradsync.tools.bench.faults.program", "gradsync.tools.bench.faults.elastic_program"
RESTARTS = 3
# A variable that says which rank it is, where torchrun has started it alone.
REPLICA = "REPLICA_GROUP_ID"
FINGERPRINTS_EVERY = 5
# Less than a group has for a collective, so that the barrier speaks first.
MONITORED = timedelta(seconds=8)


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


WRAPPERS: dict[str, Peer] = {peer.name: peer for peer in (_Guarded(), DDP(), _Checked(), Accelerate())}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of them. ``launcher`` are the arguments of Python that start its ranks, before the settings, and
    ``variables`` what these find in the environment; ``judge`` says what going on is. ``needs`` is a module."""

    name: str
    launcher: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    judge: type[Judge] = Judge
    needs: str = ""
    meets_on_hosts: bool = True

    def absent(self, case: str) -> str | None:
        """Why it cannot take part, or None."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return "not installed"
        if case == CUT_LINK and not self.meets_on_hosts:
            return "not measured between hosts"
        return None


AGAINST_FAULTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
    *(f"--max-restarts={RESTARTS}", "-m", PROGRAM),
)
# The launchers of `gradsync train`, and of `gradsync train --elastic`.
_OURS = (
    "-c",
    "import sys; from gradsync.tools.cli.launching import run_ranks_of; "
    f"sys.exit(run_ranks_of({PROGRAM!r}, sys.argv[1:], nproc={RANKS}, max_restarts={RESTARTS}))",
)
_OURS_ELASTIC = (
    "-c",
    "import sys; from gradsync.tools.cli.launching import run_elastic_ranks_of; "
    f"sys.exit(run_elastic_ranks_of({ELASTIC_PROGRAM!r}, sys.argv[1:], nproc={RANKS}, ranks={RANKS}, min_ranks=1))",
)
CONTENDERS = {
    each.name: each
    for each in (
        Contender(name=OURS, launcher=_OURS),
        Contender(name=DDP().name, launcher=_TORCHRUN),
        Contender(name=TUNED, launcher=_TORCHRUN, variables=AGAINST_FAULTS),
        Contender(name=Accelerate().name, launcher=_TORCHRUN, needs=Accelerate().needs),
        Contender(name=ELASTIC, launcher=_OURS_ELASTIC, judge=ElasticJudge, needs=TORCHFT, meets_on_hosts=False),
        Contender(
            name=TORCHFT,
            launcher=("-m", "gradsync.tools.bench.faults.replicas"),
            judge=ElasticJudge,
            needs=TORCHFT,
            meets_on_hosts=False,
        ),
    )
}
