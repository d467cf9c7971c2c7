"""``OverlappedOptimizer``: gathers means behind the next forward, for optimizers of any kind.

::

    backward          every bucket is reduce-scattered                       core/reduction/mean.py
    step()            the means are gathered, first those of what the next
                      forward needs first
    the next forward  a layer waits for the means of its own bucket, and
                      updates what is in it

Only the communication is spread out, nothing is sharded: every rank updates whole parameters with whole means, as
without it. So the optimizer may look at whole matrices, as Muon, LAMB and Shampoo do, but at one parameter at a time.

The work of a step may be done long after the call: by then ``zero_grad()`` has cleared the model's gradients, a
scheduler has changed its groups, and its parameters belong to the class of awaited ones. So the optimizers work on
shadow parameters, which share the memory of the model's and have gradients of their own, with options as they were when
the step was called.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Handle
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.shared_gradient import SharedGradient
from gradsync.optim.sharded.bucket_optimizer import BucketOptimizer, Options, refuse_original, require_optimizer
from gradsync.optim.sharded.gather import Gather, error_for_later
from gradsync.optim.sharded.mode import Mode
from gradsync.optim.sharded.states import check_groups, indexed
from gradsync.parallel.accumulation import Accumulation

__all__ = ["OverlappedOptimizer"]


class ShadowParameter:
    """A shadow of a model's parameter: ``itself`` is a parameter that shares its memory."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.itself = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)

    def follow(self) -> None:
        """Point to the parameter's current memory, which may have been replaced."""
        mine, other = self.itself, self.parameter
        if mine.data_ptr() != other.data_ptr() or mine.stride() != other.stride() or mine.dtype != other.dtype:
            mine.data = other.data


Gradients = Mapping[ShadowParameter, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DeferredStep:
    """One deferred step of ``optimizers`` over shadow parameters, made of several updates. Each uses the ``options`` of
    all groups from when the step was called; what they write there is collected in ``written``, once per step."""

    options: Options
    optimizers: Sequence[torch.optim.Optimizer]
    written: dict[int, dict[str, Any]] = field(default_factory=dict)

    def update(self, gradients: Gradients) -> None:
        """Have the optimizers update these parameters, and no others."""
        for shadow in gradients:
            shadow.follow()
        wanted = {id(shadow.itself): gradient for shadow, gradient in gradients.items()}
        for number, optimizer in self._numbered():
            if any(id(shadow) in wanted for group in optimizer.param_groups for shadow in group["params"]):
                self._step(number, optimizer, wanted)

    def count(self, idle: Sequence[bool]) -> None:
        """Have optimizers that are ``idle``, because none of their parameters has a gradient, step on nothing: they may
        count their steps."""
        for (number, optimizer), is_idle in zip(self._numbered(), idle, strict=True):
            if is_idle:
                self._step(number, optimizer, {})

    def _numbered(self) -> Iterator[tuple[int, torch.optim.Optimizer]]:
        """The optimizers, each with the index of its first group."""
        number = 0
        for optimizer in self.optimizers:
            yield number, optimizer
            number += len(optimizer.param_groups)

    def _step(self, number: int, optimizer: torch.optim.Optimizer, gradients: Mapping[int, torch.Tensor]) -> None:
        groups = optimizer.param_groups
        all_of_them = [group["params"] for group in groups]
        for group, options in zip(groups, _copied(self.options[number : number + len(groups)]), strict=True):
            group.update(options)
            group["params"] = [shadow for shadow in group["params"] if id(shadow) in gradients]
        shadows: list[nn.Parameter] = list(chain.from_iterable(group["params"] for group in groups))
        for shadow in shadows:
            # For narrow parameters, means may be wider than an optimizer expects.
            shadow.grad = gradients[id(shadow)].to(shadow.dtype)
        try:
            with torch._C._EnableTorchFunction():
                # The optimizer must see only the shadows, not the model's parameters.
                optimizer.step()
        finally:
            for shadow in shadows:
                shadow.grad = None
            for place, (group, params) in enumerate(zip(groups, all_of_them, strict=True), number):
                group["params"] = params
                old = self.options[place]
                changed = {key: value for key, value in group.items() if key != "params"}
                changed = {key: value for key, value in changed.items() if not _is_equal(value, old.get(key))}
                self.written.setdefault(place, {}).update(changed)


class OverlappedOptimizer(BucketOptimizer):
    """``optimizer``, or a sequence of several as one, whose means arrive behind the next forward of ``model``.

    They are taken over with their groups, options and state. The groups are the same objects: a scheduler that was
    created with one of the optimizers still drives it. From then on step, save and load this one instead of them::

        optimizer = OverlappedOptimizer([Muon(matrices), torch.optim.AdamW(others)], model)

    An optimizer must update each parameter by its own gradient alone. torch's optimizers do, except LBFGS; a class of
    your own declares it with an attribute ``parameter_wise = True``.

    After :meth:`step` parameters wait for their means. Whatever reads one waits, and has it updated; :meth:`flush` does
    that for all. With ``mode="auto"`` this is tried against plain steps, and the faster of the two is kept.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        model: Accumulation,
        *,
        mode: Mode = "next-forward",
    ) -> None:
        optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
        for each in optimizers:
            _require_parameter_wise(each)
        if not optimizers:
            raise ConfigurationError("OverlappedOptimizer needs at least one optimizer of the model, got none")
        groups = [{**group} for optimizer in optimizers for group in optimizer.param_groups]
        self._shadows = {id(p): ShadowParameter(p) for p in indexed(groups)}
        self._inner = [_on_shadows(optimizer, self._shadows) for optimizer in optimizers]
        self._inside: list[Bucket] = []
        # The step whose updates may not all have been made.
        self._running: DeferredStep | None = None
        super().__init__(model, groups, {}, mode)
        # Schedulers look at this.
        self.defaults = {key: value for optimizer in optimizers for key, value in optimizer.defaults.items()}
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._guard_originals(optimizers)

    # -- in the buckets of the engine ------------------------------------------------------------------------------

    def release_buckets(self) -> None:
        self._inside = []

    def buckets_rebuilt(self, buckets: Sequence[Bucket]) -> None:
        self._inside = list(buckets) if self._scatters else []

    # -- the step --------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        with self._aborting_on_error():
            for optimizer in self._originals:
                for hook in list(optimizer._optimizer_step_pre_hooks.values()):
                    if hook is not refuse_original:
                        hook(optimizer, (), {})
        self._begin_step()
        for optimizer in self._originals:
            for hook in list(optimizer._optimizer_step_post_hooks.values()):
                hook(optimizer, (), {})

    def _begin_step(self) -> None:
        step = DeferredStep(options=_copied(self._all_options()), optimizers=self._inner)
        inside = {id(parameter) for bucket in self._inside for parameter in bucket.parameters}
        outside = [p for p in indexed(self.param_groups) if id(p) not in inside]
        busy = {id(self._shadows[id(p)].itself) for p in indexed(self.param_groups) if p.grad is not None}
        # The parameters that the next forward needs first are in the bucket that started last.
        by_need = self._inside[::-1]

        def make(gathers: Sequence[Gather]) -> None:
            self._running = step
            # Autograd does not ask for what is on its way: a graph that has kept an old value raises.
            increment_version([p for p in indexed(self.param_groups) if p.grad is not None])
            with self._aborting_on_error():
                step.update({self._shadows[id(p)]: p.grad for p in outside if p.grad is not None})
                step.count([busy.isdisjoint(map(id, indexed(optimizer.param_groups))) for optimizer in self._inner])
            if not by_need:
                return
            gradients = [self._gradients_of(bucket) for bucket in by_need]
            for bucket, used, gather in zip(by_need, gradients, gathers, strict=False):
                update = _Once(partial(self._use, step, used))
                gather.started(partial(self._arrive, bucket, self._gather(bucket), update))

        if by_need:
            self._synchronizer.consume_gradients()
            self._gathers.change([*(bucket.parameters for bucket in by_need), outside], make)
        else:
            make(())

    def _gradients_of(self, bucket: Bucket) -> dict[ShadowParameter, torch.Tensor]:
        """The gradients that will update the bucket's parameters: where the mean will lie, or their replacements."""
        payload = bucket.flat[: bucket.plan.payload]
        found = {}
        for parameter, view in zip(bucket.parameters, bucket.views_of(payload), strict=True):
            if parameter.grad is None or id(parameter) not in self._shadows:
                continue
            shared = isinstance(parameter.grad, SharedGradient)
            # A user who replaced a gradient may zero the replacement before it is used.
            found[self._shadows[id(parameter)]] = view if shared else parameter.grad.clone()
        return found

    def _gather(self, bucket: Bucket) -> Handle:
        payload = bucket.flat[: bucket.plan.payload]
        return self._start_gather(bucket, payload, payload[bucket.plan.share_of(self._synchronizer.communicator.rank)])

    def _arrive(self, bucket: Bucket, handle: Handle, update: Callable[[], None]) -> None:
        self._await_gather(bucket, handle)
        update()

    def _use(self, step: DeferredStep, gradients: Mapping[ShadowParameter, torch.Tensor]) -> None:
        with self._aborting_on_error():
            step.update(gradients)

    def flush(self) -> None:
        """Wait until all parameters have their new values."""
        self._gathers.finish(self._finish_step if self._running is not None else None)

    def _finish_step(self) -> None:
        """Copy back what optimizers have written into their groups, unless the groups were changed since the step."""
        step, self._running = self._running, None
        if step is None:
            return
        for number, written in step.written.items():
            mine, old = self.param_groups[number], step.options[number]
            mine.update({key: value for key, value in written.items() if _is_equal(mine.get(key), old.get(key))})

    # -- groups and state ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the buckets back, and the state to the optimizers that it came from. Call it on all ranks."""
        super().close()
        # An interrupt may have come between the two: then they do not have their state yet.
        if not self._guards:
            return
        mine = {id(shadow.itself): shadow.parameter for shadow in self._shadows.values()}
        for original, inner in zip(self._originals, self._inner, strict=True):
            original.state = defaultdict(dict)
            original.state.update(
                {mine[id(shadow)]: state for shadow, state in inner.state.items() if id(shadow) in mine}
            )
        for handle in self._guards:
            handle.remove()
        self._guards = []

    def _take_group(self, group: dict[str, Any]) -> None:
        self._shadows.update({id(p): ShadowParameter(p) for p in group["params"]})
        inner = self._inner[-1]
        inner.add_param_group({**group, "params": [self._shadows[id(p)].itself for p in group["params"]]})
        for key, value in inner.param_groups[-1].items():
            if key != "params":
                group.setdefault(key, value)
        # It goes on with it after close().
        self._originals[-1].param_groups.append(group)

    def state_dict(self) -> dict[str, Any]:
        """The state as one optimizer with all groups would have it."""
        found: dict[int, Any] = {}

        def collect() -> None:
            self._finish_step()
            states = {id(shadow): state for optimizer in self._inner for shadow, state in optimizer.state.items()}
            for place, parameter in enumerate(indexed(self.param_groups)):
                # No state for a group that is being added at this moment.
                shadow = self._shadows.get(id(parameter))
                if shadow is not None and states.get(id(shadow.itself)):
                    found[place] = states[id(shadow.itself)]

        # On the thread that makes steps: another thread may ask in the middle of one.
        self._gathers.finish(collect)
        packed = super().state_dict()
        packed["state"] = found
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of such an optimizer, or of a plain one with the same groups. Call it on all ranks."""
        self._require_open()
        check_groups(state_dict["param_groups"], self.param_groups)
        self.flush()
        self._load_options(state_dict["param_groups"])
        first = 0
        for optimizer in self._inner:
            packed = optimizer.state_dict()
            count = len(indexed(optimizer.param_groups))
            saved = {place: state_dict["state"].get(first + place) for place in range(count)}
            packed["state"] = {place: state for place, state in saved.items() if state is not None}
            optimizer.load_state_dict(packed)
            first += count


class _Once:
    """Runs once. If it raised, it raises the same again: half an update must not be made a second time."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._error: Exception | None = None

    def __call__(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._action()
        except BaseException as error:
            self._error = error_for_later(error)
            raise


def _require_parameter_wise(optimizer: Any) -> None:
    """Raise unless parameters may be updated one after the other, in several calls of its step."""
    require_optimizer(optimizer, "OverlappedOptimizer")
    kind = type(optimizer)
    name = kind.__name__
    if kind is torch.optim.LBFGS:
        raise ConfigurationError(
            "LBFGS looks at all gradients at once, and evaluates its closure several times a step, so nothing can be "
            "left to the next forward. Use it as a plain optimizer"
        )
    declared = getattr(kind, "parameter_wise", None) or getattr(kind, "element_wise", None)
    if not declared and getattr(torch.optim, name, None) is not kind:
        raise ConfigurationError(
            f"{name} is not known to update each parameter by its own gradient alone, which a step needs that is made "
            "of one update for each bucket. If it does, and counts its steps in the state of parameters or in its "
            f"groups, say so with {name}.parameter_wise = True. If it looks at all gradients at once, to clip them by "
            "their norm for instance, or counts in an attribute, use it as a plain optimizer"
        )


def _on_shadows(optimizer: torch.optim.Optimizer, shadows: Mapping[int, ShadowParameter]) -> torch.optim.Optimizer:
    """The same optimizer with the same state, over the shadows of its parameters, by their ids."""
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    # Schedulers replace the optimizer's step by their own, which steps the original.
    vars(double).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    # The hooks stay with the original: they are called once per step, not once per update.
    for name in [name for name in vars(double) if name.endswith("_hooks")]:
        setattr(double, name, OrderedDict())
    double.param_groups = [
        {**group, "params": [shadows[id(p)].itself for p in group["params"]]} for group in optimizer.param_groups
    ]
    double.state = defaultdict(dict, {shadows[id(p)].itself: state for p, state in optimizer.state.items()})
    return double


def _copied(options: Options) -> Options:
    return [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in options
    ]


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and torch.equal(first, second)
    return bool(first == second)
