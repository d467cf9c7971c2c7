"""Elastic training, in which ranks are lost and others join: the remaining ranks repeat a window that was lost.

::

    for attempt in accelerator.elastic.attempts(1000):
        with attempt as step:
            …                                # window number `step`: forwards, backwards, one optimizer step

An attempt that loses its communicator ends there, without an error. Nothing of it is kept, unless the optimizer has
stepped: then the window was complete, and a rank that did not get as far takes its state from one that did. Before the
next attempt the ranks regroup: they ask who takes part, form a process group, and give new ranks the state of rank 0.
They check for new ranks every few seconds. What a rank does there depends only on what all ranks know.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from gradsync.accelerator.numbered_windows import NumberedWindows
from gradsync.accelerator.saving import Prepared, heal
from gradsync.accelerator.world import ProcessControl, agree_on_backend, finalize_at_exit
from gradsync.base.errors import BadStepError, ConfigurationError, GradsyncError, MisuseError, PeerFailedError
from gradsync.communicator.logs import join_names
from gradsync.health.elastic import Elastic, ElasticMember, Generation, MeetingPlace, Membership, MemberStatus, meet

__all__ = ["Elasticity", "refuse_beside_elastic"]

LOGGER = logging.getLogger("gradsync")

# One question to the lighthouse; a rank that waits for others asks again.
ASK_SECONDS = 30.0
AGAIN_SECONDS = 0.1
# Regroupings that fail in a row, each because a rank was lost meanwhile.
MEETINGS = 20


def refuse_nccl(backend: str) -> str:
    """Return ``backend`` if the other ranks of its groups survive the loss of one, or refuse. The same on all ranks."""
    if "nccl" not in backend:
        return backend
    raise ConfigurationError(
        "elastic ranks cannot be connected by NCCL: when a rank is lost, torch's NCCL watchdog ends the processes of "
        "all others a minute later, also if they have made a new process group by then. Use `gradsync train "
        "--max-restarts 3`, which starts all ranks again from the newest checkpoint, or train on CPUs: "
        "Accelerator(cpu=True)"
    )


def refuse_beside_elastic(**options: Any) -> None:
    """Raise ConfigurationError for anything that cannot survive the loss of a rank."""
    wrong = sorted(name for name, value in options.items() if value)
    if wrong:
        raise ConfigurationError(
            f"elastic ranks and {' and '.join(wrong)} exclude each other: with a rank its share of the optimizer's "
            "state would be lost, and ranks that a communicator brings cannot change. Leave one of them out"
        )


class Elasticity:
    """The elasticity of one accelerator. ``step`` counts the windows that its state has completed.

    After loading a checkpoint, set ``step`` before the first attempt.
    """

    def __init__(self, settings: Elastic, prepared: Prepared, ranks: Sequence[ProcessControl]) -> None:
        self.step = 0
        self.generation: Generation | None = None
        self._settings = settings
        self._prepared = prepared
        # The accelerator and its world: both have the communicator.
        self._ranks = ranks
        self._launched = ranks[0].environment
        self._membership: Membership = settings.join(settings)
        self._place = MeetingPlace(self._membership.own_address())
        self._latest = self._since = 0
        self._asked: float | None = None
        self._looked = time.monotonic()
        self._running = self._closed = False
        self._stepped, self._entered = 0, False
        # Why the ranks regroup, if no rank has logged it, and who took part in the last generation.
        self._lost = ""
        self._former: Sequence[ElasticMember] = ()
        # Of a window that an error of this rank's own has ended: what its buffers were before.
        self._unfinished: list[torch.Tensor] | None = None
        self._hooked: set[int] = set()
        self._before: list[Callable[[], None]] = []
        self._listeners: list[Callable[[Generation], None]] = []
        finalize_at_exit()

    @property
    def has_met(self) -> bool:
        """Whether this rank takes part now, as far as it knows."""
        return self.generation is not None

    def on_meeting(self, listener: Callable[[Generation], None]) -> None:
        """Call ``listener`` after each regrouping: rank numbers and world size have changed then."""
        self._listeners.append(listener)

    def attempts(self, steps: int) -> "Iterator[AbstractContextManager[int]]":
        """An attempt at each window until ``steps`` of them are behind, and more where ranks were lost. Collective.

        An attempt is a context that gives the number of the window: it is done by all who take part, or by none.
        """
        while True:
            if self._running:
                raise MisuseError("attempts were asked for inside an attempt. Leave its block first")
            self._meet_if_due()
            if self.step >= steps:
                return
            self._entered = False
            yield self._attempt()
            if not self._entered:
                raise MisuseError(
                    "an attempt was not entered, so its window was not done and would come again for ever. Write: "
                    "for attempt in accelerator.elastic.attempts(steps): with attempt as step: …"
                )

    def before_meeting(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` before the current ranks regroup because others have come, to finish what it has started.

        It is not called where a rank was lost.
        """
        self._before.append(listener)

    @contextmanager
    def _attempt(self) -> Iterator[int]:
        if self._running:
            raise MisuseError("an attempt was begun inside another one. Leave the first block before the second")
        for prepared in self._prepared.optimizers:
            if id(prepared) not in self._hooked:
                self._hooked.add(id(prepared))
                prepared.optimizer.register_step_post_hook(self._note_step)
        buffers = [buffer.clone() for buffer in self._buffers()]
        self._stepped, self._running, self._entered = 0, True, True
        try:
            yield self.step
        except PeerFailedError as error:
            if isinstance(error, BadStepError):
                raise
            self._lose(error, buffers)
        except Exception:
            self._unfinished = buffers
            raise
        else:
            self.step += 1
        finally:
            self._running = False

    def redone(self, action: Callable[[], Any]) -> Any:
        """Run ``action()``, repeatedly until no rank is lost in it; for work outside windows. Collective."""
        while True:
            self._meet_if_due()
            try:
                return action()
            except PeerFailedError as error:
                self._lose(error, [])

    def close(self) -> None:
        """Stop taking part."""
        self._closed = True
        self._membership.close()
        self._leave()

    def windows_of(
        self, loader: DataLoader[Any], micro_batches: int, seed: int, put_on_device: bool
    ) -> NumberedWindows:
        """Windows of ``micro_batches`` for each of the ranks planned at the beginning."""
        planned = self._settings.ranks or self._launched.world_size
        size = int(loader.batch_size or 1) * micro_batches * planned
        return NumberedWindows(loader, self._ranks[0], size=size, seed=seed, put_on_device=put_on_device)

    # -- windows -------------------------------------------------------------------------------------------------------

    def _buffers(self) -> list[torch.Tensor]:
        """State that forwards change: a repeated window must not count twice in a running mean."""
        return [buffer for model in self._prepared.models.plain for buffer in model.buffers()]

    def _note_step(self, *_: Any) -> None:
        self._stepped += self._running
        if self._stepped > 1:
            raise MisuseError(
                "two optimizer steps in one attempt: were a rank lost between them, the state would belong to no "
                "window. Step once, at the end of the attempt"
            )

    def _lose(self, error: PeerFailedError, buffers: Sequence[torch.Tensor]) -> None:
        """The communicator is lost. Keeps no traceback: that would keep the generators of the window alive."""
        # One line is enough: of rank 0, or of rank 1 where rank 0 is lost. Errors name the lost rank first.
        own = None if self.generation is None else self.generation.communicator.rank
        logs = own == (1 if str(error).startswith("rank 0 ") else 0)
        LOGGER.log(logging.WARNING if logs else logging.INFO, "step %d: %s", self.step, error)
        self._lost = "" if logs else _first_line(error)
        self._drop_window(buffers)

    @torch.no_grad()
    def _drop_window(self, buffers: Sequence[torch.Tensor]) -> None:
        """Discard the window, unless it was complete, and leave the generation."""
        if self._stepped:
            self.step += 1
        elif buffers:
            for buffer, before in zip(self._buffers(), buffers, strict=True):
                buffer.copy_(before)
        for model in self._prepared.models.plain:
            for parameter in model.parameters():
                parameter.grad = None
        self._prepared.windows.forget()
        self._prepared.windows.running = []
        self._leave()

    def _leave(self) -> None:
        if self.generation is not None:
            self.generation.leave()
            self.generation = None

    # -- meetings ------------------------------------------------------------------------------------------------------

    def _meet_if_due(self) -> None:
        if self._closed:
            raise MisuseError("this rank takes part no longer: close() was called. Make another accelerator")
        if self._unfinished is not None:
            # The script has caught the error and continues, while others are in the middle of that window.
            buffers, self._unfinished = self._unfinished, None
            self._drop_window(buffers)
        if self.generation is None:
            self._meet()
        elif self._is_time_to_look(self.generation):
            self._looked = time.monotonic()
            members = self._ask()
            if {member.identity for member in members} != self.generation.identities:
                # The communicator still works, unless a rank was lost at this very moment.
                try:
                    for listener in self._before:
                        listener()
                except PeerFailedError as error:
                    LOGGER.info("step %d: %s", self.step, error)
                self._leave()
                self._meet(members)

    def _is_time_to_look(self, generation: Generation) -> bool:
        """The same on all ranks: rank 0 looks at its clock, and notes in the store before a window begins that all look
        after it. When the others have the means of that window, rank 0 has begun it, and so has noted it."""
        is_due = time.monotonic() - self._looked > self._settings.look_every
        if generation.store is None:
            return is_due
        try:
            if is_due and generation.communicator.rank == 0:
                self._looked = time.monotonic()
                generation.store.set(f"look/{self.step + 1}", b"")
            return bool(generation.store.check([f"look/{self.step}"]))
        except RuntimeError as error:
            LOGGER.info("the store of generation %d is gone: %s", generation.number, _first_line(error))
            return True

    def _meet(self, members: Sequence[ElasticMember] | None = None) -> None:
        began = time.monotonic()
        for _ in range(MEETINGS):
            chosen = self._ask() if members is None else members
            members = None
            self._latest = 1 + max(member.status.generation for member in chosen)
            try:
                self.generation = meet(
                    chosen,
                    self._membership.identity,
                    self._place,
                    timeout=self._settings.timeout,
                    backend=self._choose_backend,
                )
                self._take_over(self.generation)
            except (RuntimeError, OSError) as error:
                if isinstance(error, GradsyncError) and not isinstance(error, PeerFailedError):
                    raise
                LOGGER.info("generation %d did not come about: %s", self._latest, _first_line(error))
                self._leave()
                if dist.is_initialized():
                    dist.destroy_process_group()
            else:
                self._log_meeting(self.generation, time.monotonic() - began)
                return
        raise GradsyncError(
            f"{MEETINGS} meetings in a row came to nothing, since ranks were lost in each. See what they wrote"
        )

    def _choose_backend(self, store: Any, size: int) -> str:
        launched = replace(self._launched, world_size=size)
        return refuse_nccl(agree_on_backend(store, launched, self._ranks[0].device))

    def _ask(self) -> Sequence[ElasticMember]:
        """Ask who takes part, and return as soon as there are enough ranks."""
        settings, began = self._settings, time.monotonic()
        self._asked = began if self._asked is None else self._asked
        while True:
            try:
                members = self._membership.ask(self._standing(), ASK_SECONDS)
            except TimeoutError as error:
                if time.monotonic() - began > max(settings.patience, ASK_SECONDS):
                    raise GradsyncError(
                        f"nobody said who takes part for {time.monotonic() - began:.0f} s: {error}. Fewer than "
                        f"min_ranks={settings.min_ranks} may be left, or the lighthouse is gone"
                    ) from error
                LOGGER.warning("step %d: still waiting for other ranks (%s)", self.step, error)
                continue
            if self._are_enough(members):
                return members
            time.sleep(AGAIN_SECONDS)

    def _are_enough(self, members: Sequence[ElasticMember]) -> bool:
        """Whether there are enough ranks: by what all of them know, so that all continue, or all ask again."""
        if any(member.status.generation for member in members):
            return len(members) >= self._settings.min_ranks
        wanted = self._settings.ranks or self._launched.world_size
        return len(members) >= wanted or max(each.status.waited for each in members) > self._settings.patience

    def _standing(self) -> MemberStatus:
        return MemberStatus(
            step=self.step,
            generation=self._latest,
            since=self._since,
            waited=time.monotonic() - (self._asked or time.monotonic()),
            meeting_place=self._place.address,
            launched=self._launched.rank,
            host=socket.gethostname(),
            process=os.getpid(),
        )

    def _take_over(self, generation: Generation) -> None:
        """Switch to these ranks."""
        for each in self._ranks:
            each.go_on_with(generation.communicator)
        if generation.lagging:
            heal(self._prepared, generation.communicator, generation.lagging)
        self._prepared.models.regroup()
        self._prepared.windows.forget()
        self.step = generation.newest_step
        self._since = self._since or generation.number
        self._looked = time.monotonic()
        try:
            for listener in self._listeners:
                listener(generation)
        except OSError as error:
            # A file, not the communicator: regrouping would not help.
            raise GradsyncError(f"generation {generation.number} has met, and then: {error}") from error

    def _log_meeting(self, generation: Generation, seconds: float) -> None:
        if generation.communicator.rank == 0:
            healed = [str(generation.members[number]) for number in generation.lagging]
            missing = [
                f"rank {number} ({member})"
                for number, member in enumerate(self._former)
                if member.identity not in generation.identities
            ]
            LOGGER.warning(
                "generation %d: %d ranks go on with step %d, after %.1f s%s%s%s",
                generation.number,
                len(generation.members),
                generation.newest_step,
                seconds,
                f", without {join_names(missing)}" if missing else "",
                f" ({join_names(healed)} took the state of rank 0)" if healed else "",
                f". Before: {self._lost}" if self._lost else "",
            )
        self._lost, self._former = "", generation.members


def _first_line(error: BaseException) -> str:
    """The first line of an error, without the C++ frames that torch adds to errors of a store."""
    return str(error).partition("\n")[0]
