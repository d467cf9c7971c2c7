"""Communicator over any ``torch.distributed`` process group: NCCL, Gloo, MPI, UCC. The default."""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsync.base.errors import CommunicatorLostError, ConfigurationError
from gradsync.communicator.background import LOOK_SECONDS, GivenUpError, call_back
from gradsync.communicator.base import Handle, ReduceOp
from gradsync.communicator.base_communicator import BaseCommunicator, Shares, Sizes
from gradsync.communicator.checks import SUMMED_BY_TORCH, has_gaps
from gradsync.communicator.collective import Collective, Work
from gradsync.communicator.device_stage import DeviceCollective, DeviceWork
from gradsync.communicator.logs import LOGGER, join_names, rank_name
from gradsync.communicator.reducing import combine_in_order
from gradsync.communicator.shutdown import UnderWay, join_at_exit, keep_forever, keep_past_exit
from gradsync.communicator.transport_state import (
    Outstanding,
    StartedCollective,
    TransportState,
    clear_root_cause,
    find_root_cause,
)

__all__ = ["ProcessGroupCommunicator", "break_gloo", "is_timeout", "state_of"]

# Backends that divide while they reduce. Gloo and MPI would divide in a pass of their own.
AVERAGING_BACKENDS = frozenset({"nccl", "rccl", "xccl", "hccl"})
CPU = torch.device("cpu")
# What all backends can add up. They move other numbers as bytes.
SUMMED = SUMMED_BY_TORCH - {torch.int16}
# No collective and no exchange of ours has it.
LAST_TAG = (1 << 31) - 1
# How often a thread that waits for Gloo checks whether the communicator has been lost.
LOOK = timedelta(seconds=LOOK_SECONDS)
# With it torch has no watchdog, and its host waits in the handle.
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
# An abort that takes longer is worth a line in the log.
ABORT_SECONDS = 10.0

_states: "weakref.WeakKeyDictionary[dist.ProcessGroup, TransportState]" = weakref.WeakKeyDictionary()


# At the end of the process threads of a backend must not be the last to hold a tensor.
_under_way = keep_past_exit(UnderWay())


def state_of(group: dist.ProcessGroup) -> TransportState:
    """Communicators over one group fail together: the group is out of step for all of them."""
    if group not in _states:
        clear_root_cause(group)
    return _states.setdefault(group, TransportState())


class _TorchWork:
    """A ``Work`` of torch."""

    __slots__ = ("_has_called", "_number", "_work")

    def __init__(self, work: Any, *tensors: torch.Tensor) -> None:
        self._work = work
        self._has_called = False
        self._number = _under_way.begin(work.is_completed, tensors)

    def wait(self) -> None:
        self._work.wait()
        _under_way.end(self._number)

    def done(self) -> bool:
        return self._has_called or bool(self._work.is_completed())

    def when_done(self, callback: Callable[[], None]) -> None:
        def call(_: Any) -> None:
            # Gloo calls back before it says that it has completed.
            self._has_called = True
            call_back(callback)

        self._work.get_future().then(call)


class _GlooWork(_TorchWork):
    """A collective of Gloo's, which may never complete. See [Note: lost sends] in peer_link.py."""

    __slots__ = ("_communicator",)

    def __init__(self, communicator: BaseCommunicator, work: Any, *tensors: torch.Tensor) -> None:
        super().__init__(work, *tensors)
        self._communicator = communicator

    def wait(self) -> None:
        while not self._waited_for(LOOK):
            if self._communicator.failure is not None:
                # The group's own end would wait for the thread that is still in it.
                keep_forever(self._communicator.group)
                raise GivenUpError
        _under_way.end(self._number)

    def _waited_for(self, limit: timedelta) -> bool:
        try:
            self._work.wait(limit)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # What it has come to at this very moment, or its own error.
            self._work.wait()
        return True


class ProcessGroupCommunicator(BaseCommunicator):
    """The collectives of one process group.

    They are called on the group itself and not through ``torch.distributed``'s functions, whose checks cost tens of
    microseconds per call: a bucket is started on the path of backward.
    """

    summed = SUMMED

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), group, state=state_of(group))
        self._averaging: dict[torch.device, bool] = {}

    def __repr__(self) -> str:
        return f"ProcessGroupCommunicator({self.backend}, rank {self.rank} of {self.world_size})"

    @functools.cached_property
    def tells_failures(self) -> bool:  # type: ignore[override]
        """Gloo's connections last for ever, those of accelerators are watched by torch itself."""
        return "gloo" in self.backend

    @functools.cached_property
    def backend(self) -> str:
        return str(dist.get_backend(self.group))

    @functools.cached_property
    def device(self) -> torch.device:
        # The device torch itself uses for object collectives: the CPU where the group has a CPU backend.
        name = dist.distributed_c10d._get_object_coll_device(self.group)
        return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)

    @property
    def timeout(self) -> float:
        """Seconds after which a collective that not all ranks join is given up."""
        limit: timedelta = self.group._get_backend(self.device).options._timeout
        return limit.total_seconds()

    def averages(self, device: torch.device) -> bool:
        if device not in self._averaging:
            backend = self.group._get_backend(device)
            self._averaging[device] = backend.name() in AVERAGING_BACKENDS
        return self._averaging[device]

    # -- the collectives ----------------------------------------------------------------------------------------------

    def _all_reduce(self, collective: Collective, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        options, real = dist.AllreduceOptions(), _as_real(tensor)
        options.reduceOp = _OPERATIONS[op]
        return self._start(collective, tensor, lambda: self._work(self.group.allreduce([real], options), real))

    def _broadcast(self, collective: Collective, tensor: torch.Tensor, source: int) -> Handle:
        options, moved = dist.BroadcastOptions(), _as_bytes(tensor)
        options.rootRank, options.rootTensor = source, 0
        return self._start(collective, tensor, lambda: self._work(self.group.broadcast([moved], options), moved))

    def _all_gather(self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, shares: Shares) -> Handle:
        if shares is not None:
            # Everybody sends its share to everybody: no backend of the CPU gathers shares of several sizes.
            return self._all_to_all(
                collective, output, tensor.repeat(self.world_size), shares, (tensor.numel(),) * self.world_size
            )

        into, out, options = _as_bytes(output), _as_bytes(tensor), _AllgatherOptions()
        return self._start(
            collective, tensor, lambda: self._work(self.group._allgather_base(into, out, options), into, out)
        )

    def _reduce_scatter(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Shares
    ) -> Handle:
        if shares is not None:
            return self._exchange_and_reduce(collective, output, tensor, op, shares)

        into, out, options = _as_real(output), _as_real(tensor), dist.ReduceScatterOptions()
        options.reduceOp = _OPERATIONS[op]
        return self._start(
            collective, tensor, lambda: self._work(self.group._reduce_scatter_base(into, out, options), into, out)
        )

    def _exchange_and_reduce(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Sizes
    ) -> Handle:
        """Shares of several sizes: everybody gets what belongs to it of all, and adds it up."""
        pieces = output.new_empty(self.world_size * output.numel())
        sizes = (output.numel(),) * self.world_size

        def reduce() -> None:
            combine_in_order(list(pieces.view(self.world_size, -1)), output, op)

        return self._all_to_all(collective, pieces, tensor, sizes, shares).then(reduce)

    def _all_to_all(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, arriving: Sizes, leaving: Sizes
    ) -> Handle:
        into, out = _as_bytes(output).view(-1), _as_bytes(tensor).view(-1)
        # Counted in what they are sent as.
        size = output.itemsize // into.itemsize
        counts = [size * count for count in arriving], [size * count for count in leaving]
        return self._start(
            collective, tensor, lambda: self._work(self.group.alltoall_base(into, out, *counts), into, out)
        )

    def _start(self, collective: Collective, tensor: torch.Tensor, start: Callable[[], Work]) -> Handle:
        if tensor.is_cpu:
            return self._issue(collective, start)
        self._refuse_in_vain()
        handle = self._issue(DeviceCollective(self, collective, tensor.device), start, on_host=False)
        # What a graph captures runs when the graph does, and torch's watchdog does not see it.
        is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.state.complete_message is not None and self._tells_outcomes and not is_captured:
            self._list(handle)
        return handle

    def _refuse_in_vain(self) -> None:
        """Fail before starting a collective on a device that could never end. torch would accept it, and the host could
        block on a lock that torch's watchdog holds for a minute after an error."""
        state = self.state
        if state.failure is not None:
            return
        if state.lost_rank is not None and state.started >= state.lost_after:
            self.lose(state.lost_rank)
        overdue = None if state.outstanding is None else state.outstanding.overdue(state.device_timeout)
        if overdue is not None:
            # This process was stopped, or the watch, which should have come before, was not run.
            seconds = time.monotonic() - overdue.started_at
            message = f"{rank_name(self.group, self.rank)} has been in {overdue.describe()} for {seconds:.0f} s"
            self.lose(message if state.complete_message is None else state.complete_message(message))

    @functools.cached_property
    def _tells_outcomes(self) -> bool:
        """Whether works on a device say how they ended; see :mod:`gradsync.communicator.transport_state`."""
        return all(os.environ.get(name, "0") in ("", "0") for name in BLOCKING_WAIT)

    def _list(self, collective: Collective) -> None:
        """Add the collective to those that the device has yet to finish, for the watch."""
        assert isinstance(collective.work, DeviceWork)
        try:
            outcome = collective.work.outcome()
        except RuntimeError:
            # Gloo has none, and its host waits in the handle.
            self._tells_outcomes = False
            return
        if self.state.outstanding is None:
            self.state.outstanding = Outstanding()
        number, place = collective.number, collective.place
        what = collective.kind, collective.detail, collective.numel, collective.dtype
        self.state.outstanding.add(StartedCollective(outcome, place, time.monotonic(), number, *what))

    def _work(self, work: Any, *tensors: torch.Tensor) -> Work:
        if not tensors[0].is_cpu:
            return DeviceWork(work, tensors)
        return _GlooWork(self, work, *tensors) if self._is_gloo else _TorchWork(work, *tensors)

    @functools.cached_property
    def _is_gloo(self) -> bool:
        return bool(self.group._get_backend(CPU).name() == "gloo")

    def _refused(self, collective: Collective, error: BaseException) -> BaseException:
        # Whether the communicator has failed, or torch has only refused an argument.
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error)):
            return self.explain(collective, error)
        return error

    def _check(self, kind: str, tensor: torch.Tensor) -> None:
        super()._check(kind, tensor)
        # Backends see memory and not strides: gaps would be filled with sums of what lies there.
        if not tensor.is_contiguous() and (tensor.dtype not in SUMMED or has_gaps(tensor)):
            raise ConfigurationError(
                f"{kind} over a process group expects tensors without gaps, got shape {list(tensor.shape)} with "
                f"strides {list(tensor.stride())}. Pass tensor.contiguous()"
            )

    # -- failing ------------------------------------------------------------------------------------------------------

    def _translate_error(self, collective: Collective, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError):
            return error
        reason = str(error).partition("\n")[0]
        others = join_names(
            [rank_name(self.group, rank) for rank in range(self.world_size) if rank != self.rank] or ["none"]
        )
        message = (
            f"{rank_name(self.group, self.rank)}: {collective.describe()} failed in the process group "
            f"({self.backend}): {reason}. Of {others} one has ended, hangs or runs other collectives; see what they "
            "wrote, and start all ranks again"
        )
        return CommunicatorLostError(find_root_cause(self.group, message))

    def _tell_others(self, reason: str) -> None:
        find_root_cause(self.group, self._given_up_text(reason))
        for device_type in self.group._device_types:
            backend = self.group._get_backend(device_type)
            if backend.name() == "gloo":
                break_gloo(backend, self.rank, self.world_size)
            elif hasattr(backend, "abort"):
                _spare_shutdown(self.group)
                _abort_in_background(backend, repr(self))


def break_gloo(backend: Any, rank: int, world_size: int) -> None:
    """Close the group's connections, here and for the others. Gloo has no way to be asked to.

    But it closes them when somebody has waited too long: for a message that nobody sends.
    """
    # It has a set of connections for every interface, which messages use in turn, by their tags.
    interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    for number in range(interfaces):
        # Of one that is gone it fails without having waited, and closes no other.
        for step in range(1, world_size):
            try:
                message = backend.recv([torch.empty(1)], (rank + step) % world_size, LAST_TAG - number)
                message.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if is_timeout(error):
                    break


def _spare_shutdown(group: dist.ProcessGroup) -> None:
    """Have nobody shut the group down or run its destructor, which both wait for torch's NCCL watchdog. Once that has
    seen an error it sleeps for a minute and then ends the process, before anybody has read what was raised."""
    keep_forever(group)
    # From these names destroy_process_group() takes the groups that it shuts down.
    dist.distributed_c10d._world.pg_names.pop(group, None)


def _abort_in_background(backend: Any, name: str) -> None:
    """End the kernels of the backend's collectives, so that nobody waits for the device any more.

    In threads of their own, one per group: an abort waits for the whole device, and so for the kernels of other groups
    that have to be aborted, too.
    """
    ended = threading.Event()

    def abort() -> None:
        try:
            backend.abort()
        except Exception as error:
            LOGGER.warning("%s could not be aborted: %s", name, str(error).partition("\n")[0])
        finally:
            ended.set()

    def look() -> None:
        if not ended.wait(ABORT_SECONDS):
            LOGGER.warning("the abort of %s has not ended within %g s: its kernels may still run", name, ABORT_SECONDS)

    for target in (abort, look):
        thread = threading.Thread(target=target, name="gradsync abort", daemon=True)
        thread.start()
        if target is abort:
            join_at_exit(thread)


def is_timeout(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as twice as many real ones: not all backends know them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as bytes or real numbers if its dtype is one that backends may not know."""
    if tensor.dtype in SUMMED and not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.reshape(-1).view(torch.uint8)


# torch exports the options of the other collectives by name, but not these.
_AllgatherOptions: Any = vars(dist.distributed_c10d)["AllgatherOptions"]

_OPERATIONS: dict[ReduceOp, Any] = {"sum": dist.ReduceOp.SUM, "average": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
