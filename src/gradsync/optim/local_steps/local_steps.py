"""``LocalSteps``: each rank takes optimizer steps on its own, and ranks periodically agree on parameters.

::

    optimizer.step()      one more step of the cycle
                          what was sent ``delay`` steps ago has arrived: merge it        tensor_exchange.py
                          is a fragment due?
                              how far are the others?                                    progress.py
                              send what has changed since they last agreed               tensor_exchange.py

[Note: what fails] Everything a round brings is waited for before any parameter is written. If it does not arrive,
parameters are unchanged, the ranks are out of step, and this object refuses to go on.
"""

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError, GradsyncError, MisuseError
from gradsync.communicator import Communicator, choose_communicator, fit_communicator
from gradsync.communicator.agreement import make_together, require_agreement
from gradsync.communicator.logs import log_errors
from gradsync.core.bucket import ParameterSpec
from gradsync.core.reduction import Mean, Reduction
from gradsync.health.watch import set_watch
from gradsync.optim.local_steps.arguments import (
    Optimizers,
    Settings,
    check_state,
    checked_reduction,
    communicator_of,
    counted_optimizer,
    cut,
    described,
    inner_optimizers,
    replica_of,
)
from gradsync.optim.local_steps.progress import Agreed, Intent, negotiate
from gradsync.optim.local_steps.tensor_exchange import (
    AveragedBuffers,
    Outer,
    OuterFactory,
    TensorExchange,
    make_outer,
    merge_into,
    wide,
)
from gradsync.parallel.data_parallel import DistributedDataParallel, TrainingAlone
from gradsync.parallel.replica import broadcast_tensors
from gradsync.parallel.state_transfer import state_of_rank_0

__all__ = ["LocalSteps"]


@dataclass(kw_only=True)
class _Sending:
    """The fragments that are being sent, with a copy of their parameters if ``steps_left`` are to be taken before they
    are merged."""

    fragments: tuple[int, ...]
    sent: dict[int, torch.Tensor]
    steps_left: int


class LocalSteps:
    """Lets each rank train ``model`` on its own, and merges the models of all ranks after every ``every`` steps.

    Without ``outer`` the merged model is the mean of their parameters. With it, as in
    ``functools.partial(torch.optim.SGD, lr=0.5, momentum=0.7, nesterov=True)``, this optimizer takes the difference
    between the parameters that ranks last agreed on and that mean as a gradient. ``reduction``, a name or an object,
    determines how it is sent.

    With ``fragments`` the model is sent in that many parts, each at a step of its own, and merged ``delay`` steps
    later: ranks train on while it is being sent. ``group`` is a process group or a communicator; by default the
    wrapper's, or all ranks.

    A hook counts the steps of ``optimizer``; the training loop only has to call :meth:`finish` at its end. In a list of
    optimizers, the last one's steps count. All ranks create it alike, and start from the parameters of rank 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        every: int,
        outer: OuterFactory | None = None,
        reduction: Reduction | str | None = None,
        fragments: int = 1,
        delay: int = 0,
        group: Any = None,
    ) -> None:
        known = group if isinstance(group, Communicator) else communicator_of(model) if group is None else None
        chosen = choose_communicator(group) if known is None else known

        def check() -> tuple[torch.optim.Optimizer, list[ParameterSpec], Reduction]:
            self.settings = Settings(every=every, fragments=fragments, delay=delay)
            self._replica = replica_of(model)
            trained = [index for index, each in enumerate(self._replica.parameters) if each.requires_grad]
            self._parameters = [self._replica.parameters[index] for index in trained]
            specs = [self._replica.specs[index] for index in trained]
            if fragments > len(specs):
                raise ConfigurationError(
                    f"fragments={fragments} cannot each have a parameter of a model that trains {len(specs)}. Take "
                    "fewer fragments"
                )
            counted, sent = counted_optimizer(optimizer, self._parameters), checked_reduction(reduction)
            sent.examine(wide(specs))
            self._outer: Outer | None = make_outer(outer, self._parameters, wide(specs), exact=type(sent) is Mean)
            return counted, specs, sent

        counted, specs, sent = make_together(chosen, "prepare local steps", check)
        self._communicator = known or fit_communicator(chosen, self._replica.device).communicator
        given = described(self.settings, self._replica, sent, self.outer)
        require_agreement(self._communicator, "what LocalSteps was given", given)
        broadcast_tensors([*self._replica.parameters, *self._replica.buffers], self._communicator)
        set_watch(self._communicator)
        if self._outer is not None:
            self._outer.reset(self._parameters)
        runs = cut([spec.nbytes for spec in specs], fragments)
        self._exchange = TensorExchange(self._parameters, specs, runs, sent, self._communicator)
        self._buffers = AveragedBuffers(self._replica, self._communicator)
        self._schedule = self.settings.schedule
        self._step = self._rounds = 0
        # The next fragment, and how many steps were taken here since each was sent.
        self._next, self._drift = 0, [0] * fragments
        self._running: _Sending | None = None
        # As text: an exception would keep everything alive that its traceback refers to.
        self._failure: str | None = None
        self._closed = False
        # Stops a wrapper from averaging gradients.
        self._alone = TrainingAlone(model) if isinstance(model, DistributedDataParallel) else None
        # The hook holds this object, and nothing here holds the optimizers: no cycle keeps the model alive.
        self._optimizers = [weakref.ref(each) for each in inner_optimizers(optimizer)]
        self._hook = counted.register_step_post_hook(self._after_step)

    def __repr__(self) -> str:
        settings, state = self.settings, "closed" if self._closed else f"step {self._step} of a cycle"
        return (
            f"LocalSteps(every={settings.every}, fragments={settings.fragments}, delay={settings.delay}: {state}, "
            f"{self._rounds} synchronizations)"
        )

    def trains(self, model: nn.Module) -> bool:
        """Whether it is ``model``, or one that shares parameters with it, that takes these steps."""
        return not {id(each) for each in self._parameters}.isdisjoint(map(id, model.parameters()))

    @property
    def synchronizations(self) -> int:
        """How many times something was sent."""
        return self._rounds

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, for learning rate schedules; None where parameters are averaged."""
        return None if self._outer is None else self._outer.optimizer

    # -- steps ---------------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._require_usable()
        self._step += 1
        self._drift = [steps + 1 for steps in self._drift]
        running = self._running
        if running is not None:
            running.steps_left -= 1
            if running.steps_left == 0:
                self._merge()
        due = self._schedule.get(self._step)
        if self._step == self.settings.every:
            self._step = 0
        if due is not None:
            self._run_round(Intent.FRAGMENT)

    def synchronize(self) -> None:
        """Send everything now and merge it: afterwards all ranks hold the same bits, and the cycle starts again.

        All ranks call it, for instance before they save. It takes part in the rounds of ranks that are not there yet.
        """
        self._require_usable()
        self._run_until_whole(Intent.EVERYTHING)

    def finish(self) -> None:
        """Synchronize everything for the last time, when all ranks have reached their end, and :meth:`close`.

        A rank whose peers still step takes part in their rounds until then, with its parameters as they are. A wrapped
        model averages gradients again, and its optimizers go on with the state of rank 0: with a state per rank, equal
        gradients would be different steps.
        """
        if self._closed:
            return
        self._require_usable()
        while not self._run_until_whole(Intent.FINISH).finished:
            pass
        # All ranks are here.
        alone, self._alone = self._alone, None
        if alone is not None:
            alone.end()
            self._share_optimizers()
        self.close()

    def _share_optimizers(self) -> None:
        """Give the optimizers the state that rank 0 has. Collective."""
        if self._communicator.world_size > 1:
            optimizers = [each for reference in self._optimizers if (each := reference()) is not None]
            states = state_of_rank_0(self._communicator, lambda: [each.state_dict() for each in optimizers])
            # Rank 0 as well: loading may change a state's dtype.
            for each, state in zip(optimizers, states, strict=True):
                each.load_state_dict(state)

    def close(self) -> None:
        """Stop counting steps. Nothing is sent: parameters stay as they are on each rank.

        A wrapped model then refuses to go on; after :meth:`finish` it would average gradients again.
        """
        self._closed, self._running = True, None
        self._hook.remove()
        if self._alone is not None:
            self._alone.give_up(
                "local steps of this model were closed before finish(), so that parameters may differ between ranks. "
                "Wrap the module again, which takes those of rank 0, or load a checkpoint into it before"
            )
            self._alone = None

    def __enter__(self) -> Self:
        self._require_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
            elif issubclass(kind, Exception) and self._failure is None and not self._closed:
                # The others wait for this rank, or will: tell them that it is not coming.
                with log_errors("telling the other ranks failed"):
                    self._run_round(Intent.FAILED)
        finally:
            self.close()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _run_until_whole(self, intent: Intent) -> Agreed:
        while not (agreed := self._run_round(intent)).whole:
            pass
        return agreed

    def _run_round(self, intent: Intent) -> Agreed:
        """Run one round, including what others ask for; see :mod:`gradsync.optim.local_steps.progress`. Collective."""
        with self._noting_failure():
            self._merge()
            misfit = None if intent is Intent.FAILED else self._misfit()
            if misfit is not None:
                # The others are told first: they are waiting.
                with suppress(GradsyncError):
                    negotiate(self._communicator, self._rounds, self._next, Intent.FAILED, self._drift)
                raise MisuseError(f"{misfit}. finish() before you change it, and make a new LocalSteps")
            agreed = negotiate(self._communicator, self._rounds, self._next, intent, self._drift)
            self._send(agreed, delay=self.settings.delay if intent is Intent.FRAGMENT else 0)
            return agreed

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Keep an error inside as the reason to refuse to go on: ranks are out of step after it."""
        try:
            yield
        except BaseException as failure:
            self._failure = f"{type(failure).__name__}: {failure}"
            raise

    def _misfit(self) -> str | None:
        """What part of the model has changed since it was compared over the ranks, in words."""
        ours = {id(parameter) for parameter in self._parameters}
        for spec, parameter in zip(self._replica.specs, self._replica.parameters, strict=True):
            if parameter.requires_grad and id(parameter) not in ours:
                return (
                    f"parameter {spec.name!r} is trained, but was frozen when LocalSteps was made, so that it would "
                    "differ on every rank"
                )
        return self._buffers.misfit

    @torch.no_grad()
    def _send(self, agreed: Agreed, *, delay: int) -> None:
        """Start what was agreed on, and merge it now unless it is delayed."""
        parameters = self._parameters
        last = agreed.whole or agreed.fragments[-1] == self.settings.fragments - 1
        # A cycle in which nothing has changed counts as none.
        self._rounds += bool(agreed.fragments)
        self._next = 0 if last else self._next + 1
        sent = {}
        if delay:
            members = [index for number in agreed.fragments for index in self._exchange.runs[number]]
            sent = {index: parameters[index].detach().clone() for index in members}
        self._exchange.start(agreed.fragments, parameters, None if self._outer is None else self._outer.anchors)
        if last:
            self._buffers.start(keep=delay > 0)
        for number in agreed.fragments:
            self._drift[number] = 0
        if agreed.whole:
            self._step = 0
        self._running = _Sending(fragments=agreed.fragments, sent=sent, steps_left=delay)
        if not delay:
            self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        """Wait for what is being sent, if anything, and update the parameters with it. See [Note: what fails]."""
        running, self._running = self._running, None
        if running is None:
            return
        with self._noting_failure():
            self._exchange.wait()
            self._buffers.wait()
            means = self._exchange.results(running.fragments)
            values: Sequence[torch.Tensor] | dict[int, torch.Tensor] = means
            if self._outer is not None and means:
                self._outer.step(means)
                values = self._outer.anchors
            for index in means:
                merge_into(self._parameters[index], values[index], running.sent.get(index))
            self._buffers.finish()

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise MisuseError(
                f"a synchronization of local steps has failed ({self._failure}), and "
                "ranks are out of step. Call close(), and make a new LocalSteps on all ranks, or start again from a "
                "checkpoint"
            )
        if self._closed:
            raise MisuseError("these local steps are finished. Make a new LocalSteps on all ranks to go on")

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as plain values and tensors; best taken right after :meth:`synchronize`.

        It has the outer optimizer's state and the anchors, which are the same on all ranks, the position in the cycle,
        and what the reduction keeps. Parameters and the inner optimizer's state are not in it.
        """
        if self._running is not None:
            raise MisuseError("state_dict() was called while a fragment is on its way. Call synchronize() before")
        outer = self._outer
        return {
            "ranks": self._communicator.world_size,
            "step": self._step,
            "rounds": self._rounds,
            "next": self._next,
            "drift": list(self._drift),
            "anchors": {} if outer is None else {name: a.detach().clone() for name, a in self._named_anchors(outer)},
            # Copies: the next round changes the tensors.
            "outer": None if outer is None else copy.deepcopy(outer.optimizer.state_dict()),
            "reduction": self._exchange.reduction.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called, on all ranks alike. Load the model separately.

        What a reduction holds back belongs to one rank. On fewer ranks, that of the missing ones is lost; on more, all
        of it is.
        """
        self._require_usable()
        if self._running is not None:
            raise MisuseError("load_state_dict() was called while a fragment is on its way. Call synchronize() before")
        outer = self._outer
        check_state(state, self.settings, self.outer, {} if outer is None else dict(self._named_anchors(outer)))
        if state["ranks"] >= self._communicator.world_size:
            # First, because it may refuse what it is given.
            self._exchange.reduction.load_state_dict(copy.deepcopy(state["reduction"]))
        if outer is not None:
            outer.optimizer.load_state_dict(copy.deepcopy(state["outer"]))
            for name, anchor in self._named_anchors(outer):
                anchor.copy_(state["anchors"][name])
        self._step, self._rounds, self._next = state["step"], state["rounds"], state["next"]
        # At the beginning of a cycle nothing has drifted, in however many fragments.
        self._drift = list(state["drift"]) if any(state["drift"]) else [0] * self.settings.fragments

    def _named_anchors(self, outer: Outer) -> Iterator[tuple[str, nn.Parameter]]:
        return ((spec.name, anchor) for spec, anchor in zip(self._exchange.specs, outer.anchors, strict=True))
