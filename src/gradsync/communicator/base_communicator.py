"""The base class of all communicators: everything they have in common, so that each of them only moves bytes.

A communicator derives from :class:`BaseCommunicator` and implements ``_all_reduce``, ``_broadcast``, ``_all_gather``,
``_reduce_scatter`` and ``_all_to_all``. Each receives a :class:`Collective` and checked arguments, and returns the
collective through one of two methods:

- ``_queue_up`` for work that runs in Python from beginning to end: on the communicator's queue, in order;
- ``_issue`` for work that proceeds by itself once started: at once or, if stages that come before it have not run yet,
  after them.

A communicator over others may override ``_route``, which passes a collective on to one of them.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gradsync.base.errors import CommunicatorLostError, ConfigurationError, GradsyncError, MismatchError, MisuseError
from gradsync.communicator.background import Background, GivenUpError, Numbering
from gradsync.communicator.base import Communicator, Counts, Handle, ReduceOp, Stage
from gradsync.communicator.checks import (
    SUMMED_BY_TORCH,
    check_dense,
    check_operation,
    check_parts,
    check_shares,
    check_source,
    check_summed,
    check_together,
)
from gradsync.communicator.collective import (
    Allocation,
    Collective,
    InlineWork,
    QueuedWork,
    StageHandle,
    Work,
    copy_failure,
)
from gradsync.communicator.logs import LOGGER, log_errors, rank_name
from gradsync.communicator.shutdown import register
from gradsync.communicator.transport_state import TransportState

__all__ = ["BaseCommunicator", "Here", "Shares", "Sizes", "Start"]

Sizes = tuple[int, ...]
"""Elements per rank."""

Shares = Sizes | None
"""Elements per rank, as :data:`Counts` that were checked. None: all are equal."""

Start = Callable[[Communicator], Handle]
"""Starts a collective on another communicator."""

Here = Callable[[Collective], Handle]
"""Starts a collective on this communicator."""

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")


class BaseCommunicator:
    """Base class that provides argument checks, numbering, failure handling, stages and logging."""

    # Whether ranks that raise MismatchError, all of them, are still in step.
    survives_mismatch = False
    # Whether the others are notified of a collective that failed here, as if it had been given up: else they wait.
    tells_failures = False
    summed = SUMMED_BY_TORCH

    def __init__(self, rank: int, world_size: int, group: Any = None, *, state: TransportState | None = None) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group
        self.state = TransportState() if state is None else state
        self._order = Numbering()
        self._background: Background | None = None
        self._aborted = False
        self._is_forked = False
        self._logs = LOGGER.isEnabledFor(logging.DEBUG)
        register(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size})"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def failure(self) -> GradsyncError | None:
        return self.state.failure

    @property
    def failure_flags(self) -> list[torch.Tensor]:
        """Flags in host memory, of which one is not zero once there is a failure; see :attr:`TransportState.flag`."""
        return [self.state.flag]

    def averages(self, device: torch.device) -> bool:
        return False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    # -- the collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        # On the path of backward, where nothing is to be checked for a sum.
        if op != "sum":
            check_operation(op, tensor.dtype)
        self._check("all_reduce", tensor)
        return self._route(
            Collective(self, "all_reduce", op, tensor.numel(), tensor.dtype),
            tensor,
            lambda other: other.all_reduce(tensor, op),
            lambda collective: self._all_reduce(collective, tensor, op),
        )

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        check_source(source, self.world_size)
        self._check("broadcast", tensor)
        return self._route(
            Collective(self, "broadcast", f"from {source}", tensor.numel(), tensor.dtype),
            tensor,
            lambda other: other.broadcast(tensor, source),
            lambda collective: self._broadcast(collective, tensor, source),
        )

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, counts: Counts = None) -> Handle:
        check_together("all_gather", output, tensor)
        shares = check_shares("all_gather", output, tensor, counts, self.rank, self.world_size)
        self._check("all_gather", output)
        return self._route(
            Collective(self, "all_gather", "", output.numel(), output.dtype),
            output,
            lambda other: other.all_gather(output, tensor, shares),
            lambda collective: self._all_gather(collective, flat(output), flat(tensor), shares),
        )

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum", counts: Counts = None
    ) -> Handle:
        check_operation(op, tensor.dtype)
        check_together("reduce_scatter", output, tensor)
        shares = check_shares("reduce_scatter", tensor, output, counts, self.rank, self.world_size)
        self._check("reduce_scatter", tensor)
        return self._route(
            Collective(self, "reduce_scatter", op, tensor.numel(), tensor.dtype),
            tensor,
            lambda other: other.reduce_scatter(output, tensor, op, shares),
            lambda collective: self._reduce_scatter(collective, flat(output), flat(tensor), op, shares),
        )

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_counts: Counts = None, input_counts: Counts = None
    ) -> Handle:
        check_together("all_to_all", output, tensor)
        arriving = check_parts("all_to_all", "output", output, output_counts, self.world_size)
        leaving = check_parts("all_to_all", "tensor", tensor, input_counts, self.world_size)
        if arriving[self.rank] != leaving[self.rank]:
            raise ConfigurationError(
                f"all_to_all: this rank sends itself {leaving[self.rank]} elements by input_counts and expects "
                f"{arriving[self.rank]} by output_counts"
            )
        self._check("all_to_all", tensor)
        return self._route(
            Collective(self, "all_to_all", "", tensor.numel(), tensor.dtype),
            tensor,
            lambda other: other.all_to_all(output, tensor, arriving, leaving),
            lambda collective: self._all_to_all(collective, flat(output), flat(tensor), arriving, leaving),
        )

    def _route(self, collective: Collective, tensor: torch.Tensor, elsewhere: Start, here: Here) -> Handle:
        """Start the collective ``here``; a communicator over others may start it on one of them, ``elsewhere``."""
        return here(collective)

    def abort(self, reason: str) -> None:
        message, is_news = self._given_up_text(reason), not self._aborted
        self._give_up(message, reason)
        if is_news and self.state.report_given_up is not None:
            self.state.report_given_up(message)

    def lose(self, message: str) -> None:
        """Other ranks are known to be gone from an outside source: raise CommunicatorLostError with ``message`` here.

        Like :meth:`abort`, it never blocks, and may be called from any thread.
        """
        self._give_up(message, message)

    def _given_up_text(self, reason: str) -> str:
        return f"{rank_name(self.group, self.rank)} has given its communicator up: {reason}"

    def _give_up(self, message: str, reason: str) -> None:
        if not self._is_forked:
            self._fail(CommunicatorLostError(message))
            self._tell_once(reason)

    # -- what a communicator implements -------------------------------------------------------------------------------

    def _lacks(self, collective: Collective, *_: Any, **__: Any) -> Handle:
        """A communicator that serves one purpose need not implement all five. Nothing was sent or counted by then."""
        kind = collective.kind
        raise ConfigurationError(
            f"{type(self).__name__} has no {kind}. Write _{kind} in it, or use another communicator"
        )

    _all_reduce = _broadcast = _all_gather = _reduce_scatter = _all_to_all = _lacks

    def _check(self, kind: str, tensor: torch.Tensor) -> None:
        """Refuse what this communicator cannot move or reduce."""
        check_dense(kind, tensor)
        check_summed(kind, tensor, self.summed)

    def _tell_others(self, reason: str) -> None:
        """Notify the other ranks that this one has given up, if the transport can."""

    def _make_queue(self) -> Background:
        return Background("gradsync stages")

    def _make_numbering(self, number: int | str) -> Numbering:
        """A numbering for the collectives of stage ``number``."""
        return Numbering(str(number))

    # -- starting -----------------------------------------------------------------------------------------------------

    def _queue_up(self, collective: Collective, run: Callable[[], None], *, lazy: bool = False) -> Collective:
        """Have ``run`` do the whole collective, after those that were started before it."""
        if self.state.failure is not None:
            self._refuse_after_failure()
        queue = self._background or self._queue
        self._take_place(collective, queue.place() or self._order)

        def work() -> None:
            if self.state.failure is not None:
                self._refuse_after_failure()
            try:
                run()
            except BaseException as error:
                explained = self.explain(collective, error)
                if explained is error:
                    raise
                raise explained from error

        collective.work = queue.start(work, lazy=lazy)
        if self._logs:
            self._log_end(collective)
        return collective

    def _issue(self, collective: Collective, start: Callable[[], Work], *, on_host: bool = True) -> Collective:
        """Have ``start`` set the collective going. A device's is ordered by streams, and never left to a thread."""
        if self.state.failure is not None:
            self._refuse_after_failure()
        place = self._order if self._background is None else self._place()
        self._take_place(collective, place)
        try:
            if self._background is not None and place is self._order and self._background.busy:
                collective.work = self._issue_in_turn(self._background, start, on_host=on_host)
            else:
                collective.work = start()
        except BaseException as error:
            # Refused, on all ranks alike: it was never started.
            place.count -= 1
            explained = self._refused(collective, error)
            if explained is error:
                raise
            raise explained from error
        if self._logs:
            self._log_end(collective)
        return collective

    def _take_place(self, collective: Collective, numbering: Numbering) -> None:
        collective.number = numbering.next()
        collective.place = self.state.next_place()
        if self._logs:
            self._log_start(collective)

    def _issue_in_turn(self, queue: Background, start: Callable[[], Work], *, on_host: bool) -> Work:
        """Have ``start`` begin the collective after the stages that are still to be run."""
        if not on_host:
            queue.start(lambda: None).wait()
            return start()

        def run() -> Work:
            self._refuse_after_failure()
            return start()

        return QueuedWork(queue, run)

    def _refused(self, collective: Collective, error: BaseException) -> BaseException:
        """What to raise for the error with which the start of ``collective`` ended."""
        return error

    def _allocate_below(
        self, communicator: Communicator, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory of a ``communicator`` that this one is made of, and whose waits others see on this one. It counts here
        also where that one needs nobody, as on a host with one rank: places are the same on all ranks."""
        if device.type != "cpu" or self._is_forked:
            return communicator.allocate(numel, dtype, device)
        return self._allocate_together(numel, dtype, lambda: communicator.allocate(numel, dtype, device))

    def _allocate_together(self, numel: int, dtype: torch.dtype, run: Callable[[], T]) -> T:
        """Have ``run`` do on this thread what all ranks do together to share memory. It has a place among the
        collectives: the watch sees that this rank waits, and which rank has not come."""
        self._refuse_after_failure()
        allocation, work = Allocation(self, numel, dtype), InlineWork(run)
        allocation.place, allocation.work = self.state.next_place(), work
        allocation.wait()
        return work.result

    def start_stage(self, first: Handle, stage: Stage) -> Handle:
        """Start ``stage`` after ``first``: the :meth:`Handle.then` of this communicator's handles."""
        # One within another is run on the spot, and counts where that one does.
        is_inner = self._place() is not self._order
        handle = StageHandle(self, first)
        if self._logs:
            self._log_start(handle)
        own = None if is_inner else self._make_numbering(handle.number)
        handle.work = QueuedWork(self._queue, lambda: handle.call(first, stage), own)
        if self._logs:
            self._log_end(handle)
        return handle

    def take_number(self) -> int | str:
        return self._place().next()

    @property
    def _queue(self) -> Background:
        if self._background is None:
            self._background = self._make_queue()
        return self._background

    def _place(self) -> Numbering:
        """The numbering that counts the next collective: that of the stage that starts it, or that of all others."""
        place = None if self._background is None else self._background.place()
        return self._order if place is None else place

    # -- failing ------------------------------------------------------------------------------------------------------

    def explain(self, collective: Collective, error: BaseException) -> BaseException:
        """What to raise for ``error`` of ``collective``. The communicator is broken, unless all are in step."""
        if isinstance(error, MismatchError) and self.survives_mismatch:
            return error
        if self.world_size == 1 and not isinstance(error, Exception):
            # An interrupt, and no other rank is left in the middle of anything.
            return error
        failure, own = self.failure, isinstance(collective, StageHandle) and not isinstance(error, GivenUpError)
        if failure is not None and not own and isinstance(error, Exception):
            # It may be that of a communicator below this one, which sticks to this one, too.
            detailed = self._add_watch_details(failure)
            self._fail(detailed)
            return copy_failure(self.state.failure or detailed)
        explained = error if own else self._add_watch_details(self._translate_error(collective, error))
        if self.state.failure is not None and not own and isinstance(error, Exception):
            # It was lost in another thread meanwhile, which knows the cause.
            return copy_failure(self.state.failure)
        lost = explained
        if not isinstance(lost, GradsyncError):
            message = f"rank {self.rank} failed in {collective.describe()}: {type(error).__name__}: {error}"
            lost = CommunicatorLostError(message.rstrip(": "))
        self._fail(lost)
        if self.tells_failures:
            self._tell_once(str(lost))
        return explained

    def _add_watch_details(self, error: E) -> E:
        """The ``error`` with what the watch knows of the other ranks in its message, if this is the first failure."""
        complete_message = self.state.complete_message
        if complete_message is None or self.state.failure is not None or not isinstance(error, CommunicatorLostError):
            return error
        detailed = type(error)(complete_message(str(error)))
        detailed.__cause__ = error.__cause__
        return detailed

    def _translate_error(self, collective: Collective, error: BaseException) -> BaseException:
        """Turn an ``error`` of the transport into a GradsyncError that explains it; return any other as it is."""
        return error

    def _fail(self, failure: GradsyncError) -> None:
        self.state.fail(failure)
        if self._background is not None:
            self._background.give_up()

    def after_fork(self) -> None:
        """Break this copy in a forked child: the communicator belongs to the parent, which must not notice the copy.

        A rank that is alone has no peers, and continues in the child.
        """
        if self.world_size == 1:
            return
        self._is_forked = self._aborted = True
        parent = f"{rank_name(self.group, self.rank)} (process {os.getppid()})"
        self.state.failure = MisuseError(
            f"this process ({os.getpid()}) was forked from {parent}, and a communicator does not come along: its "
            "threads are the parent's, and so are its connections. Do without it in the child, such as a worker of a "
            "DataLoader, or make a new process group there"
        )

    def shutdown(self, seconds: float) -> None:
        """Stop this communicator's threads at process exit. See shutdown.py."""
        if self._is_forked or self._background is None:
            return
        if self._background.busy:
            self.abort("its process ends, and did not wait for what was under way")
        self._background.close(seconds)

    def _tell_once(self, reason: str) -> None:
        if not self._aborted:
            self._aborted = True
            with log_errors("notifying the other ranks failed"):
                self._tell_others(reason)

    def _refuse_after_failure(self) -> None:
        failure = self.state.failure
        if failure is not None:
            raise copy_failure(failure)

    # -- logs ---------------------------------------------------------------------------------------------------------

    def _log_start(self, collective: Collective) -> None:
        LOGGER.debug("rank %d: start %s", self.rank, collective.measured())

    def _log_end(self, collective: Collective) -> None:
        collective.when_done(lambda: LOGGER.debug("rank %d: end %s", self.rank, collective.name()))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor without its shape; itself where it has none, since every view costs its time."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)
