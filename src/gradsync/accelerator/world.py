"""The ranks that were started together: :func:`connect` runs the rendezvous, and a :class:`World` is the result.

A world of one has no process group: nothing is opened, and nothing has to be closed.
"""

import atexit
import functools
import itertools
import os
import socket
import time
import warnings
import weakref
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsync.accelerator.fresh_start import run_id
from gradsync.accelerator.process_control import ProcessControl
from gradsync.base.environment import ProcessEnvironment, read_environment
from gradsync.base.errors import ConfigurationError, NoProcessGroupError
from gradsync.communicator import Communicator, InProcessWorld, ProcessGroupCommunicator, choose_communicator
from gradsync.communicator.agreement import gather_bytes

__all__ = ["World", "agree_on_backend", "connect", "settle_at_exit", "unmet"]

SETTLING_SECONDS = 0.1


def connect(
    environment: ProcessEnvironment,
    *,
    cpu: bool = False,
    timeout: timedelta | None = None,
    communicator: Communicator | None = None,
) -> "World":
    """Connect to the other ranks. Collective.

    The ranks are those of ``communicator``, else of :func:`gradsync.testing.run_ranks` if this is one of its threads,
    else of the default process group if there is one, else those of ``environment``. Only in the last case a process
    group is made, and only that one does :meth:`World.close` destroy.
    """
    try:
        existing = choose_communicator(communicator)
    except NoProcessGroupError:
        return _connect_anew(environment, cpu, timeout)
    if (existing.rank, existing.world_size) != (environment.rank, environment.world_size):
        # Spawned, or threads: no launcher said who shares a machine.
        environment = _located(existing, environment)
    return World(existing, _choose_device(environment, cpu), environment, given=communicator is not None)


def unmet(environment: ProcessEnvironment, *, cpu: bool = False) -> "World":
    """A rank that has not connected yet: a world of one that will have more ranks, and perhaps different ones later."""
    if dist.is_available() and dist.is_initialized():
        raise ConfigurationError(
            "there is a process group already, whose ranks cannot change. Elastic ranks make a new one whenever they "
            "meet: leave out init_process_group(), or elastic="
        )
    return World(
        InProcessWorld(1).communicator(0), _choose_device(environment, cpu), environment, owns_group=True, elastic=True
    )


# All ranks connect equally often, so the number keeps the messages of one connection from the next one's. The meeting
# place stays open: were rank 0 to close it, a faster rank might be there already for the next meeting.
_connections = itertools.count()
_meeting_places: dict[str, Any] = {}


def _connect_anew(environment: ProcessEnvironment, cpu: bool, timeout: timedelta | None) -> "World":
    device = _choose_device(environment, cpu)
    if environment.world_size == 1:
        return World(InProcessWorld(1).communicator(0), device, environment)
    rank, world_size = environment.rank, environment.world_size
    host = f"[{environment.master_addr}]" if ":" in environment.master_addr else environment.master_addr
    address = f"tcp://{host}:{environment.master_port}"
    number = next(_connections)
    limits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        if address not in _meeting_places:
            meeting: Any = dist.rendezvous(address, rank, world_size, **limits)  # type: ignore[attr-defined]
            _meeting_places[address] = _apart(next(meeting)[0], environment, timeout)
        store: Any = dist.PrefixStore(f"gradsync/{number}", _meeting_places[address])  # type: ignore[attr-defined]
        backend = agree_on_backend(store, environment, device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **limits)
    except Exception as error:
        error.add_note(
            f"while rank {rank} of {world_size} (started by {environment.launcher}) met the others at {address}. Every "
            "rank must reach that address; if something else listens there, set MASTER_PORT to a free port"
        )
        raise
    settle_at_exit()
    return World(choose_communicator(), device, environment, owns_group=True)


def _apart(store: Any, environment: ProcessEnvironment, timeout: timedelta | None) -> Any:
    """``store`` without what an earlier life of the ranks may have left there: torchrun keeps its own over restarts."""
    if environment.launcher != "torchrun" or not dist.is_torchelastic_launched():
        return store
    word = run_id(store, environment.rank, environment.world_size, timeout)
    return dist.PrefixStore(f"gradsync/life/{word}", store)  # type: ignore[attr-defined]


@functools.cache
def settle_at_exit() -> None:
    """Let Gloo's threads let go of tensors before the interpreter ends.

    They do so a little after a collective, later on busy cores, and need the interpreter for it: a thread that finds it
    gone ends the process with "terminate called without an active exception", whatever the program's exit code was.
    """
    atexit.register(time.sleep, SETTLING_SECONDS)


def _choose_device(environment: ProcessEnvironment, cpu: bool) -> torch.device:
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher may show every rank all GPUs of the node or just its own; in both cases this is the right one.
    device = torch.device("cuda", environment.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def agree_on_backend(store: Any, environment: ProcessEnvironment, device: torch.device) -> str:
    """NCCL needs one GPU per rank of a host, and all ranks must choose the same backend."""
    on_gpu = device.type == "cuda"
    # NCCL's own name for the host: ranks of different hosts may share a GPU, as in the lab.
    host = os.environ.get("NCCL_HOSTID", "")
    alone = on_gpu and store.add(f"gpu {torch.cuda.get_device_properties(device).uuid} {host}", 1) == 1
    if not (alone and dist.is_nccl_available()):
        store.add("ranks without a gpu of their own", 1)
    if store.add("ranks", 1) == environment.world_size:
        store.set("all are here", b"")
    store.wait(["all are here"])
    lacking = store.add("ranks without a gpu of their own", 0)
    if lacking and on_gpu and environment.local_rank == 0:
        warnings.warn(
            f"{lacking} of {environment.world_size} ranks have no GPU of their own, so NCCL cannot connect them: Gloo "
            "does, more slowly. Start at most as many ranks a node as it has GPUs",
            stacklevel=4,
        )
    return "gloo" if lacking else "cpu:gloo,cuda:nccl"


def _located(communicator: Communicator, environment: ProcessEnvironment) -> ProcessEnvironment:
    """``environment`` with the places that ``communicator`` has, and the hosts' names to tell which are local."""
    hosts = gather_bytes(communicator, socket.gethostname().encode())
    rank, host = communicator.rank, hosts[communicator.rank]
    return replace(
        environment,
        rank=rank,
        world_size=communicator.world_size,
        local_rank=Counter(hosts[:rank])[host],
        local_world_size=Counter(hosts)[host],
    )


# Those that somebody holds, for what was pickled and comes back.
_living: "weakref.WeakValueDictionary[tuple[Any, ...], World]" = weakref.WeakValueDictionary()


def _found_again(key: tuple[Any, ...]) -> "World":
    living = _living.get(key)
    return connect(read_environment(), cpu=key[1].type == "cpu") if living is None else living


class World(ProcessControl):
    """The connected ranks. ``given``: through a communicator of the caller's, which an engine then uses as it is.

    ``elastic``: the ranks may change, so a rank that is alone now needs everything that several ranks need.
    """

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device,
        environment: ProcessEnvironment,
        *,
        owns_group: bool = False,
        given: bool = False,
        elastic: bool = False,
    ) -> None:
        super().__init__(communicator, device, environment)
        self.is_elastic = elastic
        self._given = given
        self._owns_group = owns_group
        self._pretended_type: str | None = None
        _living[self._key] = self

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.environment, self.device, self.communicator.rank, self.communicator.world_size)

    def __reduce__(self) -> tuple[Any, ...]:
        """In the same process the same world; elsewhere the one that is found there."""
        return (_found_again, (self._key,))

    def __repr__(self) -> str:
        return f"World(rank {self.process_index} of {self.num_processes}, {self.device}, {self.distributed_type})"

    @property
    def distributed_type(self) -> str:
        """A :class:`~gradsync.accelerator.process_control.DistributedType`, or what a script has set.

        Scripts may pretend to be another kind of training, as under Accelerate. Gradients are averaged all the same.
        """
        return super().distributed_type if self._pretended_type is None else self._pretended_type

    @distributed_type.setter
    def distributed_type(self, kind: str) -> None:
        self._pretended_type = None if kind == super().distributed_type else kind

    @property
    def is_process(self) -> bool:
        """Whether its ranks are processes that torch.distributed knows, or it is alone: not threads, nor MPI's."""
        return isinstance(self.communicator, ProcessGroupCommunicator) or self.num_processes == 1

    @property
    def engine_options(self) -> dict[str, Any]:
        """Which ranks an engine synchronizes. Unless a communicator was given, it may find a faster wire to them."""
        if isinstance(self.communicator, ProcessGroupCommunicator) and not self._given:
            return {"process_group": self.communicator.group}
        return {"communicator": self.communicator}

    def destroy_process_group(self) -> None:
        """Destroy the default process group, no matter who created it."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def close(self) -> None:
        """Destroy the process group if :func:`connect` made it. May be called again."""
        if self._owns_group:
            self.destroy_process_group()
