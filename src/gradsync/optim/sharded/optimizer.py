"""``ShardedOptimizer``: each rank updates its share of a bucket; parameters are gathered behind the next forward.

::

    backward          every bucket is reduce-scattered                       core/reduction/mean.py
    step()            this rank's share of each is updated                   optim/sharded/share.py
                      new parameters are gathered, first those that the
                      next forward needs first                               optim/sharded/gather.py
    the next forward  a layer waits for its own parameters, if they are
                      not there yet

An all-reduce is a reduce-scatter and an all-gather: the same bytes are sent. But the second half no longer comes
between backward and step, the optimizer's work is divided by the number of ranks, and so is its state.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Handle
from gradsync.communicator.agreement import make_together
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.precise import NARROW, restore_gradients
from gradsync.core.engine.step_guard import reads_found_inf, step_gated
from gradsync.optim.sharded.bucket_optimizer import BucketOptimizer, require_optimizer
from gradsync.optim.sharded.gather import Gather
from gradsync.optim.sharded.mode import Mode
from gradsync.optim.sharded.segments import Segments
from gradsync.optim.sharded.share import Part, Share
from gradsync.optim.sharded.states import (
    ParameterState,
    check_groups,
    from_parameter,
    gather_states,
    indexed,
    is_wide,
    to_parameter,
)
from gradsync.parallel.accumulation import Accumulation

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(BucketOptimizer):
    """``optimizer``, sharded over the ranks of ``model``: with its groups, options and state.

    The groups are the same objects: a scheduler that was created with the original also drives this one. The optimizer
    must be element-wise: torch's SGD, Adam, AdamW, Adagrad and similar ones are. A class of your own declares it with
    an attribute ``element_wise = True``.

    After :meth:`step` new parameters are still being gathered. Whatever reads one waits for it; :meth:`flush` waits for
    all. With ``mode="auto"`` this is tried against plain steps, and the faster of the two is kept: see
    :mod:`gradsync.optim.sharded.mode`. Where steps are plain, every rank has the whole state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: Accumulation, *, mode: Mode = "next-forward") -> None:
        _require_element_wise(optimizer)
        self._class, accepted = type(optimizer), inspect.signature(type(optimizer)).parameters
        self._options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        # Defines what the groups of this class look like, and updates what has no place in a bucket.
        self._outside = self._class([dict(group) for group in optimizer.param_groups], **self._options)
        groups = [{**group, "params": list(group["params"])} for group in self._outside.param_groups]
        # The state in the form of a plain optimizer's, and when it was consolidated.
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._consolidated_at = -1
        # None while steps are plain.
        self._segments: Segments | None = None
        super().__init__(model, groups, self._outside.defaults, mode)
        if optimizer.state:
            self.load_state_dict(optimizer.state_dict())
        for group, original in zip(self.param_groups, optimizer.param_groups, strict=True):
            original.update(group)
        self.param_groups = optimizer.param_groups
        self._guard_originals([optimizer])

    # -- in the buckets of the engine ------------------------------------------------------------------------------

    def release_buckets(self) -> None:
        if self._segments is not None:
            self._segments.release_buckets()

    def buckets_rebuilt(self, buckets: Sequence[Bucket]) -> None:
        """Move the state with its parameters, after buckets were rebuilt. Collective."""
        if not self._scatters:
            buckets = []
            if self._segments is None:
                return
        shares = [Share(bucket, self._synchronizer.communicator.rank) for bucket in buckets]
        parts = {part.index: part for share in shares for part in share.parts}
        inside = {slot.parameter for bucket in buckets for slot in bucket.plan.slots}
        states: dict[int, ParameterState] = {}
        for index, state in self._all_states():
            if index in parts:
                states[index] = state.part(parts[index])
            elif index not in inside:
                self._keep_outside(index, state)
        numbers = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        group_of = {index: numbers[id(p)] for index, p in enumerate(self._synchronizer.parameters) if id(p) in numbers}
        self._segments = Segments(shares, group_of, self._make_inner_optimizer, states) if self._scatters else None
        self._update_outside({id(parameter) for bucket in buckets for parameter in bucket.parameters})

    def _all_states(self) -> Iterator[tuple[int, ParameterState]]:
        """The state of every parameter that has any. Collective."""
        synchronizer = self._synchronizer
        if self._segments is not None:
            for share in self._segments.shares:
                yield from gather_states(share, self._segments.states(share), synchronizer.communicator)
        for index, parameter in enumerate(synchronizer.parameters):
            if self._outside.state.get(parameter):
                yield index, from_parameter(self._outside.state[parameter], parameter, synchronizer.specs[index])

    def _keep_outside(self, index: int, state: ParameterState) -> None:
        """Keep the state of a parameter that has no place in a bucket, whole, on every rank."""
        parameter = self._synchronizer.parameters[index]
        kept = to_parameter(state, self._synchronizer.specs[index], parameter.device)
        self._outside.state[parameter] = kept

    def _update_outside(self, inside: Collection[int]) -> None:
        """Have every rank update what is not ``inside`` buckets, from now on."""
        for group, ours in zip(self._outside.param_groups, self.param_groups, strict=True):
            group["params"] = [parameter for parameter in ours["params"] if id(parameter) not in inside]
        for parameter in [parameter for parameter in self._outside.state if id(parameter) in inside]:
            del self._outside.state[parameter]

    def _make_inner_optimizer(self, members: Sequence[tuple[int, list[nn.Parameter]]]) -> torch.optim.Optimizer:
        """Make the optimizer over segments. ``members``: for each group its number, and flat parameters."""
        groups = [{**self._group_options(number), "params": parameters} for number, parameters in members]
        return self._class(groups, **self._options)

    # -- the step --------------------------------------------------------------------------------------------------

    @property
    def reads_found_inf(self) -> bool:
        """Whether the device can skip a step by itself, so that the host need not wait: only where steps are plain.

        Shares are sent by the host, which must know whether the others send theirs.
        """
        return self._segments is None and reads_found_inf(self._outside)

    def _update(self) -> None:
        """Update this rank's shares, and have all ranks gather them, in the order in which the next forward needs them.

        What has no place in a bucket is part of the same step: no reader gets it without the rest.
        """
        options, segments = self._all_options(), self._segments
        if segments is None:
            with self._aborting_on_error():
                self._step_outside(options)
            return
        self._synchronizer.consume_gradients()
        by_need = segments.shares[::-1]

        def make(gathers: Sequence[Gather]) -> None:
            with self._aborting_on_error():
                self._step_outside(options)
            self._step_shares(segments, options, dict(zip(by_need, gathers, strict=False)))

        outside = indexed(self._outside.param_groups)
        self._gathers.change([*(share.bucket.parameters for share in by_need), outside], make)

    def _step_shares(
        self, segments: Segments, options: Sequence[dict[str, Any]], gathers: Mapping[Share, Gather]
    ) -> None:
        segments.place(self._synchronizer.parameters)
        changing = segments.prepare()
        # Let autograd see it, which does not ask: a graph that has kept one of these raises, as with a plain optimizer.
        increment_version(segments.changing)
        # From here on parameters are neither old nor new. The bucket that started last holds what is needed first. It
        # is sent while the others are updated.
        by_need = segments.shares[::-1]
        for shares in by_need[:1], by_need[1:]:
            with self._aborting_on_error():
                segments.update(options, [segment for segment in changing if segment.share in shares])
            for share in shares:
                share.fill_sent()
                # Not through the reduce-scatter communicator: Gloo's own gather uses less of a core.
                handle = self._start_gather(share.bucket, share.gathered, share.sent)
                gathers[share].started(partial(self._arrive, share, handle))

    def _arrive(self, share: Share, handle: Handle) -> None:
        """Wait for the new parameters of a bucket, and replace the old ones with them."""
        self._await_gather(share.bucket, handle)
        share.receive()

    def _step_outside(self, options: Sequence[dict[str, Any]]) -> None:
        """Update what has no place in a bucket: its gradient is the mean on every rank."""
        for group, current in zip(self._outside.param_groups, options, strict=True):
            group.update(current)
        if any(parameter.grad is not None for parameter in indexed(self._outside.param_groups)):
            # Means of narrow parameters may be wide, and this is a plain optimizer. But a parameter that has left its
            # bucket temporarily has a state that is wide, too.
            narrow = [p for p in indexed(self._outside.param_groups) if p.dtype in NARROW]
            restore_gradients([p for p in narrow if not is_wide(self._outside.state.get(p, {}), p)])
            # This step has already been checked.
            with self._synchronizer.switched(steps_locally=True):
                step_gated(self._outside, getattr(self, "found_inf", None))

    def close(self) -> None:
        super().close()
        self._segments = None

    # -- groups and state ------------------------------------------------------------------------------------------

    def _take_group(self, group: dict[str, Any]) -> None:
        self._outside.add_param_group({**group, "params": list(group["params"])})
        if self._segments is not None:
            self.buckets_rebuilt(self._synchronizer.buckets)

    def consolidate(self, to: int | None = None) -> None:
        """Bring the whole state together, for :meth:`state_dict`: on rank ``to``, or on all. Collective."""
        self._require_open()
        self.flush()
        communicator = self._synchronizer.communicator
        keeps = to is None or to == communicator.rank
        state: dict[int, dict[str, Any]] = {}
        places = {id(p): place for place, p in enumerate(indexed(self.param_groups))}
        for index, slot_state in self._all_states():
            place = places.get(id(self._synchronizer.parameters[index]))
            if keeps and place is not None:
                state[place] = to_parameter(slot_state, self._synchronizer.specs[index], torch.device("cpu"))
        self._consolidated = dict(sorted(state.items())) if keeps else None
        self._consolidated_at = self._steps

    def consolidate_state_dict(self, to: int = 0) -> None:
        """:meth:`consolidate`, by the name that ``ZeroRedundancyOptimizer`` has for it. Lightning calls it to save."""
        self.consolidate(to)

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a plain optimizer, or of a sharded one on any number of ranks. Call it on all ranks."""
        self._require_open()
        check_groups(state_dict["param_groups"], self.param_groups)
        places = {id(p): place for place, p in enumerate(indexed(self.param_groups))}
        wholes = {
            index: from_parameter(saved, parameter, self._synchronizer.specs[index])
            for index, parameter in enumerate(self._synchronizer.parameters)
            if (saved := state_dict["state"].get(places.get(id(parameter)))) is not None
        }
        parts = self._parts()
        self._load(
            {index: whole.part(parts[index]) if index in parts else whole for index, whole in wholes.items()},
            state_dict["param_groups"],
        )

    @torch.no_grad()
    def _load(self, states: Mapping[int, ParameterState], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load ``states``: this rank's part of those in its shares, and the whole of all others."""
        self.flush()
        self._load_options(groups)
        parts, inside = self._parts(), self._inside()
        self._outside.state.clear()
        for index, state in states.items():
            if index not in inside:
                self._keep_outside(index, state.narrowed(self._synchronizer.parameters[index]))
        if self._segments is not None:
            self._segments.cut({index: state for index, state in states.items() if index in parts})
        self._consolidated = None

    @property
    def _shares(self) -> Sequence[Share]:
        return () if self._segments is None else self._segments.shares

    def _parts(self) -> dict[int, Part]:
        """This rank's parts of the parameters that lie in buckets."""
        return {part.index: part for share in self._shares for part in share.parts}

    def _inside(self) -> set[int]:
        """The parameters that lie in buckets, on any rank."""
        return {slot.parameter for share in self._shares for slot in share.plan.slots}

    # -- in pieces, for torch.distributed.checkpoint ---------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for ``torch.distributed.checkpoint.save``, on all ranks."""
        from gradsync.optim.sharded.pieces import pieces_of

        self._require_open()
        self.flush()
        specs, parts = self._synchronizer.specs, self._parts()
        states = {} if self._segments is None else self._segments.states()
        mine = {
            specs[index].name: (state, parts[index].inside.start, specs[index].bucket_numel)
            for index, state in states.items()
        }
        if self._synchronizer.communicator.rank == 0:
            # The same on every rank.
            for index, parameter in enumerate(self._synchronizer.parameters):
                if self._outside.state.get(parameter):
                    state = from_parameter(self._outside.state[parameter], parameter, specs[index])
                    mine[specs[index].name] = state, 0, specs[index].bucket_numel
        return pieces_of(mine, self._all_options())

    def load_sharded(self, checkpoint: "str | PathLike[str] | StorageReader", name: str = "optimizer") -> None:
        """Load what ``torch.distributed.checkpoint`` has saved under ``name``: see :meth:`sharded_state_dict`.

        On all ranks alike; their number may differ from when it was saved.
        """
        from gradsync.optim.sharded.pieces import StateReader

        self._require_open()
        specs, parts, inside = self._synchronizer.specs, self._parts(), self._inside()
        given = {id(p) for p in indexed(self.param_groups)}
        wanted = [i for i, p in enumerate(self._synchronizer.parameters) if id(p) in given]
        sizes, groups = {specs[i].name: specs[i].bucket_numel for i in wanted}, len(self.param_groups)
        communicator = self._synchronizer.communicator
        # A disk may exist on one host and not on another, and reading is a collective.
        reader = make_together(
            communicator, "read the checkpoint", lambda: StateReader(checkpoint, name, sizes, groups)
        )
        needed = {
            specs[i].name: parts[i].inside if i in parts else slice(0, specs[i].bucket_numel)
            for i in wanted
            if i in parts or i not in inside
        }
        states, options = reader.read(needed, self._synchronizer.parameters[0].device, communicator.group)
        numbers = {spec.name: index for index, spec in enumerate(specs)}
        self._load({numbers[parameter]: self._placed(state) for parameter, state in states.items()}, options)

    def _placed(self, state: ParameterState) -> ParameterState:
        """Move the state to the parameter's device, where some optimizers need it."""
        if any(group.get("fused") or group.get("capturable") for group in self.param_groups):
            device = self._synchronizer.parameters[0].device
            for key, value in state.scalars.items():
                state.scalars[key] = value.to(device) if isinstance(value, torch.Tensor) else value
        return state


_ELEMENT_WISE = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    torch.optim.ASGD,
}
_WHY_NOT = {
    "LBFGS": "it multiplies whole gradients with each other, and evaluates its closure several times",
    "SparseAdam": "it is made for sparse gradients, which are averaged on all ranks",
    "Adafactor": "it keeps sums of the rows and columns of a matrix",
    "Muon": "it orthogonalizes whole matrices",
}


def _require_element_wise(optimizer: Any) -> None:
    """Raise unless parts of a flattened parameter may be updated separately."""
    require_optimizer(optimizer, "ShardedOptimizer")
    kind = type(optimizer)
    declared = getattr(kind, "element_wise", None)
    if declared is False or (declared is None and kind not in _ELEMENT_WISE):
        reason = _WHY_NOT.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
        raise ConfigurationError(
            f"{kind.__name__} is not known to update each element by itself"
            + (f": {reason}" if reason else "")
            + ", so parameters cannot be shared out in flat pieces. If it does, say so with a class attribute "
            "element_wise = True; if it does not, use it as a plain optimizer"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigurationError("differentiable=True needs whole parameters, and a sharded optimizer has shares")
