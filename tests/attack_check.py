"""What must come of a program of ``make attack``: one process computes the same training, to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.attack_disturbances import Outcome, Snapshot
from tests.attack_programs import Program
from tests.attack_rank import make_optimizers, parameters_of_layers
from tests.soak import Paths, expected_gradients

__all__ = ["Expected", "check", "train_alone"]

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Expected:
    """The parameters before the first step and after each, and the state of the optimizers at the end."""

    states: list[list[torch.Tensor]]
    optimizers: list[dict[str, Any]]


def train_alone(program: Program) -> Expected:
    """Every window's mean over all ranks and micro-batches, computed one after the other."""
    model = Paths(program.layers)
    optimizers = make_optimizers(program, model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.93) for each in optimizers if program.scheduler]
    states = [[parameter.detach().clone() for parameter in model.parameters()]]
    made = program.optimizer
    for number, window in enumerate(program.windows):
        if made.late and number == made.added_at:
            added = {"params": parameters_of_layers(model, made.late), "lr": made.options["lr"] / 2}
            optimizers[-1].add_param_group(added)
        if window.is_skipped:
            continue
        gradients = expected_gradients(model, window.work)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if window.clip is not None:
            groups = [group for each in optimizers for group in each.param_groups]
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], window.clip)
        for mover in (*optimizers, *schedulers):
            mover.step()
        states.append([parameter.detach().clone() for parameter in model.parameters()])
    return Expected(states, [each.state_dict() for each in optimizers])


def check(program: Program, outcomes: Sequence[Outcome | None]) -> list[str]:
    """What is wrong with what came of it on each rank; None of a rank that was killed."""
    expected = train_alone(program)
    wrong = [f"rank {rank}: {line}" for rank, each in enumerate(outcomes) if each for line in each.wrong]
    bits: dict[tuple[int, int], tuple[torch.Tensor, str]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        for snapshot in outcome.snapshots:
            named = Snapshot(f"rank {rank}: {snapshot.source}", snapshot.values, snapshot.whole)
            wrong += _check_snapshot(named, expected.states, bits)
        if program.end is None:
            wrong += _check_end(rank, outcome, expected, bits)
    return wrong


def _check_end(
    rank: int, outcome: Outcome, expected: Expected, bits: dict[tuple[int, int], tuple[torch.Tensor, str]]
) -> list[str]:
    if outcome.final is None or outcome.states is None:
        return [f"rank {rank} did not come to its end"]
    wrong = []
    last = expected.states[-1]
    for index, (mine, theirs) in enumerate(zip(outcome.final, last, strict=True)):
        if not _is_close(mine, theirs):
            wrong.append(f"rank {rank}: parameter {index} ends off by {float((mine - theirs).abs().max()):g}")
    named = Snapshot(f"rank {rank}: the end", outcome.final, whole=True)
    wrong += [] if wrong else _check_snapshot(named, expected.states, bits)
    return wrong + [f"rank {rank}: {line}" for line in _compare_states(outcome.states, expected.optimizers)]


def _check_snapshot(
    snapshot: Snapshot, states: list[list[torch.Tensor]], bits: dict[tuple[int, int], tuple[torch.Tensor, str]]
) -> list[str]:
    """It is the state after a step, each parameter at least; and has the bits that all ranks have after that step."""
    fits = [
        {number for number, state in enumerate(states) if values is None or _is_close(values, state[index])}
        for index, values in enumerate(snapshot.values)
    ]
    lost = [index for index, numbers in enumerate(fits) if not numbers]
    if lost:
        return [f"{snapshot.source}: parameters {lost} are those after no step"]
    if snapshot.whole and not set.intersection(*fits):
        shown = [sorted(numbers) for numbers in fits]
        return [f"{snapshot.source}: a mixture of steps {shown}"]
    wrong = []
    for index, (values, numbers) in enumerate(zip(snapshot.values, fits, strict=True)):
        first = min(numbers)
        if values is None or any(not torch.equal(states[first][index], states[number][index]) for number in numbers):
            # Steps that are closer to each other than rounding.
            continue
        kept, source = bits.setdefault((index, first), (values, snapshot.source))
        if not torch.equal(kept, values):
            wrong.append(f"{snapshot.source} and {source}: parameter {index} after step {first} differs in bits")
    return wrong


def _compare_states(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        groups = [[len(group["params"]) for group in each["param_groups"]] for each in (mine, other)]
        if groups[0] != groups[1]:
            wrong.append(f"optimizer {number} has groups of {groups[0]} parameters for {groups[1]}")
        for place in sorted(mine["state"].keys() | other["state"].keys()):
            here, there = mine["state"].get(place, {}), other["state"].get(place, {})
            if here.keys() != there.keys():
                wrong.append(f"optimizer {number}, parameter {place}: state {list(here)} for {list(there)}")
            wrong += [
                f"optimizer {number}, parameter {place}: {key} is {here[key]} for {there[key]}"
                for key in here.keys() & there.keys()
                if not _is_close(torch.as_tensor(here[key]), torch.as_tensor(there[key]))
            ]
    return wrong


def _is_close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(mine.double(), theirs.double(), rtol=TOLERANCE, atol=TOLERANCE)
