"""All ranks, as seen from one: what only some of them run, and how those that were started together connect.

:func:`connect` runs the rendezvous, and a :class:`World` is the result. A world of one has no process group: nothing is
opened, and nothing has to be closed.

[Note: runs that share a store] A launcher that restarts ranks after a failure may keep its store, with all keys in it:
a rank that arrives first could take the stale address of a dead peer for the peer's current one. Nothing in the
environment is equal on all ranks of one run and different in the next: each of several nodes counts its own restarts.
So the ranks agree on a run id, and prefix their keys with it. Each publishes a number of its own; rank 0 replies to
exactly that number, and keeps looking: the first one it sees may be from an earlier run. ::

    rank 2   joins/2 = n          wait for offers/2/n      came/ID/2
    rank 0            look … offers/2/n = ID         look … until all have come
"""

import atexit
import functools
import itertools
import os
import socket
import time
import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from gradsync.base.environment import ProcessEnvironment, read_environment
from gradsync.base.errors import ConfigurationError, GradsyncError, NoProcessGroupError
from gradsync.communicator import Communicator, InProcessWorld, ProcessGroupCommunicator, choose_communicator
from gradsync.communicator.agreement import gather_bytes

__all__ = [
    "DistributedType",
    "ProcessControl",
    "World",
    "agree_on_backend",
    "connect",
    "finalize_at_exit",
    "run_id",
    "unmet",
]

P = ParamSpec("P")
R = TypeVar("R")
STORE_PREFIX = "gradsync/run"
LOOK_SECONDS = 0.005


class DistributedType(StrEnum):
    """Compares equal to Accelerate's members of the same name, and to their names."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"


class ProcessControl:
    """What one rank sees of all: its rank, its device, and what only some ranks do."""

    def __init__(self, communicator: Communicator, device: torch.device, environment: ProcessEnvironment) -> None:
        self.communicator = communicator
        self.device = device
        self.environment = environment

    def go_on_with(self, communicator: Communicator) -> None:
        """Become one of the ranks of ``communicator``, instead of the previous ranks."""
        self.communicator = communicator
        self.environment = replace(self.environment, rank=communicator.rank, world_size=communicator.world_size)

    @property
    def process_index(self) -> int:
        return self.communicator.rank

    @property
    def num_processes(self) -> int:
        return self.communicator.world_size

    @property
    def local_process_index(self) -> int:
        return self.environment.local_rank

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def distributed_type(self) -> str:
        """A :class:`DistributedType`."""
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    def wait_for_everyone(self) -> None:
        """Return when all ranks have called this."""
        gather_bytes(self.communicator, b"")

    def main_process_first(self) -> AbstractContextManager[None]:
        """The others enter the block when rank 0 has left it, by an exception too."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The others enter the block when the first rank of every node has left it."""
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if first:
                self.wait_for_everyone()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """A decorator: elsewhere the function does nothing and returns None."""
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        return _only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        return _only_if(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Callable[..., Any]:
        """A decorator for one rank, also as ``on_process(process_index=1)``. A world of one does the work of all."""
        chosen = self.num_processes == 1 or self.process_index == process_index
        return functools.partial(_only_if, chosen) if function is None else _only_if(chosen, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int = 0
    ) -> Callable[..., Any]:
        """A decorator for one rank of every node."""
        chosen = self.num_processes == 1 or self.local_process_index == local_process_index
        return functools.partial(_only_if, chosen) if function is None else _only_if(chosen, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's share of ``inputs``: a list, tuple or tensor, or a dict of such, all of the same length.

        The first ranks have one more if it cannot be divided evenly; with ``apply_padding`` the others repeat the last
        element of ``inputs``. ``inputs`` itself is not changed.
        """
        yield inputs if self.num_processes == 1 else self._share(inputs, apply_padding)

    def _share(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            lengths = {key: _length(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigurationError(f"all values of the dict must be equally long, got lengths {lengths}")
            return {key: self._share(value, apply_padding) for key, value in inputs.items()}
        length = _length(inputs)
        each, extra = divmod(length, self.num_processes)
        start = self.process_index * each + min(self.process_index, extra)
        stop = start + each + (self.process_index < extra)
        missing = apply_padding and each + (extra > 0) > stop - start
        if _is_dataset(inputs):
            return inputs.select([*range(start, stop), *[length - 1] * missing])
        share = inputs[start:stop]
        if not missing:
            return share
        return torch.cat([share, inputs[-1:]]) if isinstance(inputs, torch.Tensor) else share + inputs[-1:]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """The built-in, on the main process only."""
        if self.is_main_process:
            print(*args, **kwargs)


def _only_if(chosen: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if chosen else None

    return wrapper


def _is_dataset(inputs: Any) -> bool:
    """Whether it is one of Hugging Face's ``datasets``, whose rows are chosen by their numbers."""
    return callable(getattr(inputs, "select", None)) and hasattr(inputs, "__len__") and hasattr(inputs, "features")


def _length(inputs: Any) -> int:
    if isinstance(inputs, list | tuple) or _is_dataset(inputs) or (isinstance(inputs, torch.Tensor) and inputs.ndim):
        return len(inputs)
    raise ConfigurationError(
        "split_between_processes takes a list, a tuple, a tensor with at least one dimension, or a dict of such; got "
        f"{type(inputs).__name__}"
    )


_living: "weakref.WeakValueDictionary[tuple[Any, ...], World]" = weakref.WeakValueDictionary()


def _living_or_connected(key: tuple[Any, ...]) -> "World":
    return _living.get(key) or connect(read_environment(), cpu=key[1].type == "cpu")


class World(ProcessControl):
    """The connected ranks. ``given``: by a communicator of the caller's, which an engine then uses as it is.

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
        """Pickle it: in the same process it is the same world, elsewhere the one that is found there."""
        return (_living_or_connected, (self._key,))

    def __repr__(self) -> str:
        return f"World(rank {self.process_index} of {self.num_processes}, {self.device}, {self.distributed_type})"

    @property
    def distributed_type(self) -> str:
        """A :class:`~gradsync.accelerator.world.DistributedType`, or what a script has set: as under Accelerate it may
        pretend to be another kind of training. Gradients are averaged all the same."""
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
        """Which ranks an engine synchronizes. Unless a communicator was given, it may choose a faster transport."""
        if isinstance(self.communicator, ProcessGroupCommunicator) and not self._given:
            return {"process_group": self.communicator.group}
        return {"communicator": self.communicator}

    def destroy_process_group(self) -> None:
        """Destroy the default process group, no matter who created it."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def close(self) -> None:
        """Destroy the process group if :func:`connect` created it. May be called again."""
        if self._owns_group:
            self.destroy_process_group()


# -- rendezvous -------------------------------------------------------------------------------------------------------


def connect(
    environment: ProcessEnvironment,
    *,
    cpu: bool = False,
    timeout: timedelta | None = None,
    communicator: Communicator | None = None,
) -> "World":
    """Connect to the other ranks. Collective.

    The ranks are those of ``communicator``, else of :func:`gradsync.testing.run_ranks` in one of its threads, else of
    the default process group, else of ``environment``. Only the last creates a process group, which
    :meth:`World.close` destroys.
    """
    try:
        existing = choose_communicator(communicator)
    except NoProcessGroupError:
        return _connect_launched(environment, cpu, timeout)
    if (existing.rank, existing.world_size) != (environment.rank, environment.world_size):
        # Spawned, or threads: no launcher said who shares a machine.
        environment = _located(existing, environment)
    return World(existing, _choose_device(environment, cpu), environment, given=communicator is not None)


def unmet(environment: ProcessEnvironment, *, cpu: bool = False) -> "World":
    """A rank that has not connected yet: a world of one that will have other ranks later."""
    if dist.is_available() and dist.is_initialized():
        raise ConfigurationError(
            "there is a process group already, whose ranks cannot change. Elastic ranks make a new one whenever they "
            "meet: leave out init_process_group(), or elastic="
        )
    return World(
        InProcessWorld(1).communicator(0), _choose_device(environment, cpu), environment, owns_group=True, elastic=True
    )


# All ranks connect equally often, so the number separates the messages of one connection from the next one's. The
# store stays open: were rank 0 to close it, a faster rank might be using it already for the next connection.
_connections = itertools.count()
_stores: dict[str, Any] = {}


def _connect_launched(environment: ProcessEnvironment, cpu: bool, timeout: timedelta | None) -> "World":
    device = _choose_device(environment, cpu)
    if environment.world_size == 1:
        return World(InProcessWorld(1).communicator(0), device, environment)
    rank, world_size = environment.rank, environment.world_size
    host = f"[{environment.master_addr}]" if ":" in environment.master_addr else environment.master_addr
    address = f"tcp://{host}:{environment.master_port}"
    number = next(_connections)
    limits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        if address not in _stores:
            rendezvous: Any = dist.rendezvous(address, rank, world_size, **limits)  # type: ignore[attr-defined]
            store: Any = next(rendezvous)[0]
            if environment.launcher == "torchrun" and dist.is_torchelastic_launched():
                # torchrun keeps its store over restarts.
                run = run_id(store, rank, world_size, timeout)
                store = dist.PrefixStore(f"{STORE_PREFIX}/{run}", store)  # type: ignore[attr-defined]
            _stores[address] = store
        store = dist.PrefixStore(f"gradsync/{number}", _stores[address])  # type: ignore[attr-defined]
        backend = agree_on_backend(store, environment, device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **limits)
    except Exception as error:
        error.add_note(
            f"while rank {rank} of {world_size} (started by {environment.launcher}) met the others at {address}. Every "
            "rank must reach that address; if something else listens there, set MASTER_PORT to a free port"
        )
        raise
    finalize_at_exit()
    return World(choose_communicator(), device, environment, owns_group=True)


def run_id(store: Any, rank: int, world_size: int, timeout: timedelta | None = None) -> str:
    """An id that is equal on all ranks started together, and on no others. Collective, over ``store`` alone.

    See [Note: runs that share a store].
    """
    limit = timeout or timedelta(minutes=30)
    if rank == 0:
        return _offer_run_id(store, world_size, limit)
    number = uuid.uuid4().hex
    store.set(f"{STORE_PREFIX}/joins/{rank}", number)
    answer = f"{STORE_PREFIX}/offers/{rank}/{number}"
    store.wait([answer], limit)
    run: str = store.get(answer).decode()
    store.set(f"{STORE_PREFIX}/came/{run}/{rank}", "")
    return run


def _offer_run_id(store: Any, world_size: int, limit: timedelta) -> str:
    run, deadline = uuid.uuid4().hex, time.monotonic() + limit.total_seconds()
    missing, answered = set(range(1, world_size)), dict[int, bytes]()
    while True:
        missing -= {rank for rank in missing if store.check([f"{STORE_PREFIX}/came/{run}/{rank}"])}
        if not missing:
            return run
        if time.monotonic() > deadline:
            names = ", ".join(f"rank {rank}" for rank in sorted(missing))
            raise GradsyncError(f"{names} did not come within {limit.total_seconds():g} s to where the ranks meet")
        for rank in missing:
            if store.check([f"{STORE_PREFIX}/joins/{rank}"]):
                number = store.get(f"{STORE_PREFIX}/joins/{rank}")
                if answered.get(rank) != number:
                    answered[rank] = number
                    store.set(f"{STORE_PREFIX}/offers/{rank}/{number.decode()}", run)
        time.sleep(LOOK_SECONDS)


@functools.cache
def finalize_at_exit() -> None:
    """Let Gloo's threads release tensors before the interpreter ends.

    They do so a little after a collective, later on busy cores, and need the interpreter for it: a thread that finds it
    gone ends the process with "terminate called without an active exception", whatever the program's exit code was.
    """
    atexit.register(time.sleep, 0.1)


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
    """``environment`` with the ranks of ``communicator``, and local ranks by the names of their hosts."""
    hosts = gather_bytes(communicator, socket.gethostname().encode())
    rank, host = communicator.rank, hosts[communicator.rank]
    return replace(
        environment,
        rank=rank,
        world_size=communicator.world_size,
        local_rank=Counter(hosts[:rank])[host],
        local_world_size=Counter(hosts)[host],
    )
