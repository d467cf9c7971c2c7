"""Inside a rank: when each gradient of a model is ready and each parameter is needed, without a wrapper."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradsync.observe.plan.profile import BucketProfile, StepProfile

__all__ = ["ModelTimes", "time_model"]

WARM_UP, STEPS = 3, 10


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """A step whose buckets are single parameters, in the order in which they become ready; and how long forward and
    backward took in each of the steps."""

    profile: StepProfile
    seconds: list[float]


class _Marks:
    """Moments of a step, by what happened. On CUDA events, which are read when all is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.steps: list[dict[str, object]] = []

    def begin(self) -> None:
        self.steps.append({})
        self.mark("begin")

    def mark(self, name: str) -> None:
        # Of what happens several times, in a forward that uses a layer twice: the first time it is needed.
        if name.startswith("need ") and name in self.steps[-1]:
            return
        moment: object = time.perf_counter()
        if self._device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.steps[-1][name] = moment

    def between(self, first: str, second: str) -> float:
        """Median seconds from the one to the other, over the steps that count."""
        return statistics.median(self.all_between(first, second))

    def all_between(self, first: str, second: str) -> list[float]:
        return [
            self._seconds(step[first], step[second])
            for step in self.steps[WARM_UP:]
            if first in step and second in step
        ]

    def _seconds(self, first: object, second: object) -> float:
        if isinstance(first, float) and isinstance(second, float):
            return second - first
        seconds: float = first.elapsed_time(second) / 1e3  # type: ignore[attr-defined]
        return seconds


def time_model(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer, *, steps: int = STEPS
) -> ModelTimes:
    """Run a few steps of ``forward(model)``, which returns the loss, and read when what happened."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    device = next(iter(parameters.values())).device
    marks = _Marks(device)
    handles = [_on_ready(marks, name, parameter) for name, parameter in parameters.items()]
    handles += _on_need(marks, model, parameters)
    try:
        for _ in range(WARM_UP + steps):
            marks.begin()
            loss = forward(model)
            marks.mark("forward")
            loss.backward()
            marks.mark("backward")
            optimizer.step()
            optimizer.zero_grad()
            marks.mark("end")
    finally:
        for handle in handles:
            handle.remove()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _read(marks, parameters)


def _on_ready(marks: _Marks, name: str, parameter: nn.Parameter) -> torch.utils.hooks.RemovableHandle:
    handle: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(
        lambda _: marks.mark(f"ready {name}")
    )
    return handle


def _on_need(
    marks: _Marks, model: nn.Module, parameters: dict[str, nn.Parameter]
) -> list[torch.utils.hooks.RemovableHandle]:
    names = defaultdict(list)
    for name, parameter in parameters.items():
        names[id(parameter)].append(name)
    handles = []
    for module in model.modules():
        own = [name for each in module._parameters.values() if each is not None for name in names.get(id(each), [])]
        if own:

            def note(_module: nn.Module, _args: object, own: list[str] = own) -> None:
                for name in own:
                    marks.mark(f"need {name}")

            handles.append(module.register_forward_pre_hook(note))
    return handles


def _read(marks: _Marks, parameters: dict[str, nn.Parameter]) -> ModelTimes:
    pieces = []
    for name, parameter in parameters.items():
        ready = marks.all_between("forward", f"ready {name}")
        if ready:
            need = marks.all_between("begin", f"need {name}")
            pieces.append((statistics.median(ready), statistics.median(need) if need else 0.0, parameter))
    pieces.sort(key=lambda piece: piece[0])
    forward, backward = marks.between("begin", "forward"), marks.between("forward", "backward")
    buckets = tuple(
        BucketProfile(
            index=index,
            nbytes=parameter.numel() * parameter.element_size(),
            ready=min(ready, backward),
            need=min(need, forward),
        )
        for index, (ready, need, parameter) in enumerate(pieces)
    )
    profile = StepProfile(
        forward=forward, backward=backward, optimizer=marks.between("backward", "end"), buckets=buckets
    )
    return ModelTimes(profile=profile, seconds=marks.all_between("begin", "backward"))
