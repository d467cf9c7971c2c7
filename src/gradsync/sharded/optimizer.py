"""``ShardedOptimizer``: each rank updates its share of every bucket, and new parameters are gathered behind the next
forward.

::

    backward          every bucket is reduce-scattered                       reduction/scattered.py
    step()            this rank's share of each is updated                   sharded/share.py
                      new parameters are gathered, first those that the
                      next forward needs first                               sharded/journey.py, sharded/gather.py
    the next forward  a layer waits for its own parameters, if they are
                      not there yet

An all-reduce is a reduce-scatter and an all-gather: the same bytes cross the wire. But the second half of them no
longer stands between backward and step, the optimizer's work is divided by the number of ranks, and so is its state.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self, overload

import torch
from torch import nn

from gradsync.bucket import Bucket
from gradsync.engine.phase import Phase
from gradsync.engine.synchronizer import Synchronizer
from gradsync.errors import ConfigurationError, MisuseError
from gradsync.reduction import Cast, Mean, Reduction, ScatteredMean
from gradsync.sharded.element_wise import require_element_wise
from gradsync.sharded.gather import await_before_forward
from gradsync.sharded.journey import Journey
from gradsync.sharded.saving import check_groups, from_parameter, indexed, to_parameter
from gradsync.sharded.segments import ParameterState, Segments
from gradsync.sharded.share import Part, Share, is_narrow
from gradsync.sharded.states import gather_states
from gradsync.wrap.replica import Replica

__all__ = ["ShardedOptimizer"]

# Buckets at least, where the wire works by itself: a forward should not wait long for parameters that it does not need.
PIECES = 11


class Synchronized(Protocol):
    """A model whose gradients are synchronized: a DistributedDataParallel, or what synchronize_gradients returns."""

    @property
    def synchronizer(self) -> Synchronizer: ...

    @property
    def replica(self) -> Replica: ...


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of ``optimizer_class`` that is shared out over the ranks of ``model``.

    ``params`` are parameters or parameter groups of the model, by default all that are trained; everything else is
    passed on to the optimizer. It must be element-wise: torch's SGD, Adam, AdamW, Adagrad and their like are, and a
    class of your own says so with an attribute ``element_wise = True``.

    After :meth:`step` new parameters are on their way. Whatever reads one waits for it; :meth:`flush` waits for all.
    """

    _is_ready = False
    _is_closed = False

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        model: Synchronized,
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        require_element_wise(optimizer_class, options)
        self._synchronizer = _synchronizer_of(model)
        self._class, self._options = optimizer_class, options
        given = [p for p in self._synchronizer.parameters if p.requires_grad] if params is None else list(params)
        # It knows what the groups of its class look like, and updates what has no place in a bucket.
        self._outside = optimizer_class(given, **options)
        groups = [{**group, "params": list(group["params"])} for group in self._outside.param_groups]
        super().__init__(groups, self._outside.defaults)
        self._check_parameters(self.param_groups)
        self._steps = 0
        # The state in the form of a plain optimizer's, and when it was brought together.
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._consolidated_at = -1
        # The optimizer that others may still hold in the place of this one.
        self._stands_for: torch.optim.Optimizer | None = None
        self._move_in()
        await_before_forward(model.replica.module)
        self._is_ready = True

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: Synchronized) -> Self:
        """An optimizer as ``optimizer`` is, with its groups, options and state, shared out over the ranks of ``model``.

        The groups are the very same objects: a scheduler that was made with the other one moves this one.
        """
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        state = optimizer.state_dict()
        made = cls(type(optimizer), model, [dict(group) for group in optimizer.param_groups], **options)
        if state["state"]:
            made.load_state_dict(state)
        for group, original in zip(made.param_groups, optimizer.param_groups, strict=True):
            original.update(group)
        made.param_groups = optimizer.param_groups
        made._stands_for = optimizer
        return made

    def _check_parameters(self, groups: Sequence[dict[str, Any]]) -> None:
        known = {id(parameter) for parameter in self._synchronizer.parameters}
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ConfigurationError(
                        f"a parameter of shape {tuple(parameter.shape)} in group {number} does not belong to the "
                        "model, so its gradient is not averaged. Pass parameters of the model that was wrapped"
                    )
                if type(parameter) is not nn.Parameter:
                    raise ConfigurationError(
                        f"a sharded optimizer needs plain parameters, got one of type {type(parameter).__name__}"
                    )

    # -- in the buckets of the engine ------------------------------------------------------------------------------

    def _move_in(self) -> None:
        synchronizer = self._synchronizer
        if synchronizer.engine.sharing.tenant is not None:
            raise ConfigurationError(
                "another sharded optimizer has this model's parameters. One optimizer takes several parameter groups: "
                "pass them as params; or close() the other one"
            )
        communicator = synchronizer.engine.communicator
        self._journey = Journey(synchronizer, self._all_options)
        narrow = any(is_narrow(p, bucket) for bucket in synchronizer.buckets for p in bucket.parameters)
        # Alone there is nobody to share with: all is outside, and updated where it lies, if that is precise enough.
        self.lives_in_buckets = communicator.world_size > 1 or narrow
        self._reduction_before = synchronizer.reduction
        synchronizer.engine.sharing.tenant = self
        if not self.lives_in_buckets:
            return
        if synchronizer.engine.options.tuner is not None:
            synchronizer.engine.options.tuner.fewest = PIECES
        try:
            synchronizer.reduce_with(_scattered(synchronizer.reduction, self._journey))
        except BaseException:
            synchronizer.engine.sharing.tenant = None
            raise

    def received(self) -> None:
        """The means are there: :class:`~gradsync.engine.sharing.Tenant`."""
        self._journey.early.received()

    def leave(self) -> None:
        """The buckets are wanted for gradients: :class:`~gradsync.engine.sharing.Tenant`."""
        self._journey.settle()
        self._journey.pace.forward_ended()

    def move_out(self) -> None:
        """Buckets are about to go: :class:`~gradsync.engine.sharing.Tenant`."""
        self._journey.let_go()

    def moved(self, buckets: Sequence[Bucket]) -> None:
        """Buckets were laid out anew: the state follows its parameters. Collective."""
        communicator = self._synchronizer.engine.communicator
        if not self.lives_in_buckets:
            return
        shares = [Share(bucket, communicator.rank) for bucket in buckets]
        parts = {part.index: part for share in shares for part in share.parts}
        inside = {slot.parameter for bucket in buckets for slot in bucket.plan.slots}
        states: dict[int, ParameterState] = {}
        for index, state in self._all_states():
            if index in parts:
                states[index] = _part_of(state, parts[index])
            elif index not in inside:
                self._rest(index, state)
        numbers = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        group_of = {index: numbers[id(p)] for index, p in enumerate(self._synchronizer.parameters) if id(p) in numbers}
        self._journey.take(Segments(shares, group_of, self._make, states))
        self._update_outside({id(parameter) for bucket in buckets for parameter in bucket.parameters})

    def _all_states(self) -> Iterator[tuple[int, ParameterState]]:
        """The state of every parameter that has any. Collective."""
        synchronizer = self._synchronizer
        if self._journey.segments is not None:
            yield from gather_states(self._journey.segments, synchronizer.engine.communicator)
        for index, parameter in enumerate(synchronizer.parameters):
            if self._outside.state.get(parameter):
                yield index, from_parameter(self._outside.state[parameter], parameter, synchronizer.specs[index])

    def _rest(self, index: int, state: ParameterState) -> None:
        """Keep the state of a parameter that has no place in a bucket, whole, on every rank."""
        parameter = self._synchronizer.parameters[index]
        kept = to_parameter(state, self._synchronizer.specs[index], parameter.device)
        self._outside.state[parameter] = kept

    def _update_outside(self, inside: Collection[int]) -> None:
        """From now on what is not ``inside`` buckets is updated on every rank."""
        for group, ours in zip(self._outside.param_groups, self.param_groups, strict=True):
            group["params"] = [parameter for parameter in ours["params"] if id(parameter) not in inside]
        for parameter in [parameter for parameter in self._outside.state if id(parameter) in inside]:
            del self._outside.state[parameter]

    def _make(self, members: Sequence[tuple[int, list[nn.Parameter]]]) -> torch.optim.Optimizer:
        """An optimizer over segments: for each group its number, and flat parameters."""
        groups = [{**self._group_options(number), "params": parameters} for number, parameters in members]
        return self._class(groups, **self._options)

    def _all_options(self) -> list[dict[str, Any]]:
        return [self._group_options(number) for number in range(len(self.param_groups))]

    def _group_options(self, number: int) -> dict[str, Any]:
        return {key: value for key, value in self.param_groups[number].items() if key != "params"}

    # -- the step --------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's shares and send them on their way. Collective, as every step of a sharded model is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_open()
        if self._synchronizer.engine.phase is Phase.DETACHED:
            raise MisuseError(
                "the engine that this optimizer shares out was detached from the model, or the model was given another "
                "process group. Make the optimizer anew, and load the state of this one"
            )
        if self._synchronizer.engine.switches.steps_locally and self._journey.segments is not None:
            raise MisuseError(
                "a sharded optimizer cannot take local steps: every rank has the state of its own share only. Use a "
                "plain optimizer for them"
            )
        self.flush()
        self._step_outside(self._all_options())
        self._journey.step()
        self._steps += 1
        if self._stands_for is not None:
            # Which schedulers look for.
            self._stands_for._opt_called = True  # type: ignore[attr-defined]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        # Parameters that are awaited would be asked about every look at their gradient.
        with torch._C.DisableTorchFunctionSubclass():
            if set_to_none:
                super().zero_grad()
                return
        super().zero_grad(set_to_none=False)

    def _step_outside(self, options: Sequence[dict[str, Any]]) -> None:
        """Update what has no place in a bucket: its gradient is the mean on every rank."""
        for group, current in zip(self._outside.param_groups, options, strict=True):
            group.update(current)
        if any(parameter.grad is not None for parameter in indexed(self._outside.param_groups)):
            # This step has been looked at already.
            with self._synchronizer.switched(steps_locally=True):
                self._outside.step()

    def flush(self) -> None:
        """Wait until all parameters are the new ones."""
        self._journey.flush()

    def _require_open(self) -> None:
        if self._is_closed:
            raise MisuseError("this optimizer was closed: its model's gradients are another's. Make an optimizer anew")

    def close(self) -> None:
        """Give the buckets back: gradients are whole means again, for an optimizer of any kind. On all ranks alike.

        Save the state before, or :meth:`consolidate` it, if another optimizer is to go on with it.
        """
        if self._is_closed:
            return
        self._journey.settle()
        if self.lives_in_buckets and any(p.grad is not None for p in indexed(self.param_groups)):
            raise MisuseError(
                "a sharded optimizer was to be closed while gradients are there, of which every rank has its share "
                "only. Call step() and zero_grad() before close()"
            )
        self._is_closed, self._journey.segments = True, None
        self._synchronizer.engine.sharing.tenant = None
        if self.lives_in_buckets:
            if self._synchronizer.engine.options.tuner is not None:
                self._synchronizer.engine.options.tuner.fewest = 1
            self._synchronizer.reduce_with(self._reduction_before)

    # -- groups and state ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take further parameters of the model. All ranks must do so alike."""
        if self._is_ready:
            self._require_open()
            self._journey.settle()
            given = param_group["params"]
            param_group = {**param_group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}
            self._check_parameters([param_group])
        super().add_param_group(param_group)
        if self._is_ready:
            self._outside.add_param_group({**self.param_groups[-1], "params": list(self.param_groups[-1]["params"])})
            self.moved(self._synchronizer.buckets)

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError(
            "a sharded optimizer cannot be copied or pickled: it belongs to the ranks of its model. Save its "
            "state_dict() after consolidate(), and load that into another"
        )

    def consolidate(self, to: int | None = None) -> None:
        """Bring the whole state together, for :meth:`state_dict`: on rank ``to``, or on all. Collective."""
        self._require_open()
        self._journey.settle()
        communicator = self._synchronizer.engine.communicator
        keeps = to is None or to == communicator.rank
        state: dict[int, dict[str, Any]] = {}
        places = {id(p): place for place, p in enumerate(indexed(self.param_groups))}
        for index, slot_state in self._all_states():
            place = places.get(id(self._synchronizer.parameters[index]))
            if keeps and place is not None:
                state[place] = to_parameter(slot_state, self._synchronizer.specs[index], torch.device("cpu"))
        self._consolidated = dict(sorted(state.items())) if keeps else None
        self._consolidated_at = self._steps

    @property
    def has_state(self) -> bool:
        """Whether this rank has the whole state, as it is now: see :meth:`consolidate`."""
        return self._consolidated is not None and self._consolidated_at == self._steps

    def state_dict(self) -> dict[str, Any]:
        """The state as a plain optimizer of the same class would have it, after :meth:`consolidate`."""
        if not self.has_state:
            raise MisuseError(
                "every rank has only its share of this optimizer's state. Call optimizer.consolidate(to=0) on all "
                "ranks first, since the last step, and state_dict() on rank 0 then; consolidate() brings it to all"
            )
        packed = super().state_dict()
        packed["state"] = dict(self._consolidated or {})
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the state of a plain optimizer, or of a sharded one on any number of ranks. On all ranks alike."""
        self._require_open()
        check_groups(state_dict["param_groups"], self.param_groups)
        self._journey.settle()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        segments = self._journey.segments
        shares = [] if segments is None else segments.shares
        parts = {part.index: part for share in shares for part in share.parts}
        inside = {slot.parameter for share in shares for slot in share.plan.slots}
        places = {id(p): place for place, p in enumerate(indexed(self.param_groups))}
        states: dict[int, ParameterState] = {}
        wholes = {
            index: from_parameter(saved, parameter, self._synchronizer.specs[index])
            for index, parameter in enumerate(self._synchronizer.parameters)
            if (saved := state_dict["state"].get(places.get(id(parameter)))) is not None
        }
        self._outside.state.clear()
        for index, whole in wholes.items():
            if index in parts:
                states[index] = _part_of(whole, parts[index])
            elif index not in inside:
                self._rest(index, whole)
        if segments is not None:
            segments.cut(states)
        self._consolidated = None


def _part_of(whole: ParameterState, part: Part) -> ParameterState:
    """What a rank with this part keeps of the state of a parameter."""
    place = slice(part.offset, part.offset + part.stop - part.start)
    tensors = {key: value[place].to(part.parameter.device, copy=True) for key, value in whole.tensors.items()}
    return ParameterState(tensors=tensors, scalars=whole.scalars)


def _synchronizer_of(model: Any) -> Synchronizer:
    synchronizer = getattr(model, "synchronizer", None)
    if not isinstance(synchronizer, Synchronizer):
        raise ConfigurationError(
            "ShardedOptimizer needs a model whose gradients gradsync averages: a DistributedDataParallel, or what "
            f"synchronize_gradients(model) returned; got {type(model).__name__}"
        )
    return synchronizer


def _scattered(reduction: Reduction, journey: Journey) -> ScatteredMean:
    if isinstance(reduction, Mean):
        return ScatteredMean(wire=journey.wire, follower=journey)
    if isinstance(reduction, Cast | ScatteredMean):
        return ScatteredMean(reduction.dtype, journey.wire, journey)
    raise ConfigurationError(
        f"a sharded optimizer needs means, or shares of them, and {reduction!r} sends something else. Wrap the model "
        "without it"
    )
