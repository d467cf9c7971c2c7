"""How an Accelerator prepares a model: moves it, runs it under autocast, wraps it, connects it to the engine.

[Note: one scale, several optimizers] Several optimizers may step in windows that end at different times, while torch's
scaler expects all of them to step before the scale changes, once. So the scale changes as late as possible: when
another loss is scaled while no gradients of the old scale exist, or when an optimizer is about to step a second time.
Then windows that are still accumulating are converted to the new scale.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from gradsync.accelerator.compiling import TorchDynamoPlugin
from gradsync.accelerator.operations import map_tensors
from gradsync.accelerator.windows import LocalTraining
from gradsync.accelerator.world import World
from gradsync.base.errors import ConfigurationError
from gradsync.core.engine.policy import SyncPolicy
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.window.window import WindowState
from gradsync.parallel.accumulation import Accumulation
from gradsync.parallel.attach import synchronize_gradients
from gradsync.parallel.data_parallel import DistributedDataParallel

__all__ = ["LossScaler", "Precision", "PreparedModels", "extract_model_from_parallel", "refuse_prepared"]

# The wrapper's arguments that the engine without a wrapper has too.
_ENGINE = ("policy", "bucket_cap_mb")

# Those that name a communication hook.
_HOOK = ("comm_hook", "comm_wrapper", "comm_state_option")
HALF = (torch.float16, torch.bfloat16)
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


# -- mixed precision --------------------------------------------------------------------------------------------------


class LossScaler:
    """Scales losses up and gradients back down, so that small float16 gradients do not underflow."""

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        self.scaler = torch.amp.GradScaler(device.type, **options)
        # Those of all models that are trained with it.
        self.synchronizers: Callable[[], Iterable[Synchronizer]] = tuple
        self._stepped: set[int] = set()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled."""
        if self._stepped and not self._accumulating():
            self._update()
        return self.scaler.scale(loss)

    def _accumulating(self) -> list[Synchronizer]:
        return [each for each in self.synchronizers() if each.window.state is WindowState.UNSYNCHRONIZED]

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the scaling of the optimizer's gradients, unless that was done."""
        if self._is_used and self.scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step, unless gradients are not finite."""
        options = {} if closure is None else {"closure": closure}
        if not self._is_used:
            # No loss was ever scaled here.
            return optimizer.step(**options)
        if id(optimizer) in self._stepped:
            self._update()
        self._stepped.add(id(optimizer))
        return self.scaler.step(optimizer, **options)

    def finalize(self) -> None:
        """Let the scale grow or shrink right after a step, if no gradients of the old scale are around."""
        waiting = (WindowState.UNSYNCHRONIZED, WindowState.SYNCHRONIZED)
        if self._stepped and not any(each.window.state in waiting for each in self.synchronizers()):
            self._update()

    def state_dict(self) -> dict[str, Any]:
        if self._stepped:
            self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)

    @property
    def _is_used(self) -> bool:
        return self.scaler._scale is not None

    @torch.no_grad()
    def _update(self) -> None:
        before = self.scaler._scale
        if before is None:
            return
        before = before.clone()
        self.scaler.update()
        self._stepped.clear()
        factor = cast(torch.Tensor, self.scaler._scale) / before
        for synchronizer in self._accumulating():
            for bucket in synchronizer.buckets:
                bucket.payload.mul_(factor)
            synchronizer.window.changed_by_engine()
        for synchronizer in self.synchronizers():
            synchronizer.rescaled(factor)


class Precision:
    """What ``mixed_precision`` means on one device."""

    def __init__(
        self, name: str | None, device: torch.device, *, autocast: Mapping[str, Any], scaler: Mapping[str, Any]
    ) -> None:
        self.name = "no" if name is None else str(name)
        if self.name not in DTYPES:
            raise ConfigurationError(f"mixed_precision must be one of {', '.join(DTYPES)}, got {name!r}")
        self._device = device
        self._dtype = DTYPES[self.name]
        self._autocast = dict(autocast)
        # float16 alone has so small a range that gradients vanish unless losses are scaled up.
        self.scaler = LossScaler(device, scaler) if self.name == "fp16" else None

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
        """Operations in here run in the lower precision where that is safe; ``options`` replace those it has."""
        chosen = self._autocast if options is None else options
        # Inside an autocast that is on, options may turn it off.
        if self._dtype is None or (options is None and not chosen.get("enabled", True)):
            return nullcontext()
        return torch.autocast(self._device.type, **{"dtype": self._dtype, **chosen})

    def wrap_forward(self, model: nn.Module) -> None:
        """Run ``model.forward`` under autocast from now on; what it returns is float32."""
        if self._dtype is None or hasattr(model, "_gradsync_plain_forward"):
            return
        plain: Callable[..., Any] = model.forward

        @functools.wraps(plain)
        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                output = plain(*args, **kwargs)
            return map_tensors(lambda each: each.float() if each.dtype in HALF else each, output)

        model._gradsync_plain_forward = plain  # type: ignore[assignment]
        model.forward = MethodType(forward, model)


# -- the engine -------------------------------------------------------------------------------------------------------


class PreparedDistributedDataParallel(DistributedDataParallel):
    """The wrapper that an accelerator prepares: its ``no_sync()`` may contain local SGD."""

    local_training: LocalTraining

    def _get_name(self) -> str:
        """The name of the class that it stands for, to print."""
        return "DistributedDataParallel"

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in here stay on this rank. Prepared optimizers may step, if the parameters are averaged then."""
        return self.local_training.around(self.synchronizer)


class PreparedModels:
    """The models of one accelerator, each with its engine."""

    def __init__(
        self,
        world: World,
        precision: Precision,
        local: LocalTraining,
        compiler: TorchDynamoPlugin,
        options: Mapping[str, Any],
    ) -> None:
        self._world = world
        self._precision = precision
        self._compiler = compiler
        self._local = local
        self._options = dict(options)
        self._hook = {name: self._options.pop(name) for name in _HOOK if name in self._options}
        self._attachments: dict[int, Accumulation] = {}
        if precision.scaler is not None:
            precision.scaler.synchronizers = lambda: self.synchronizers
        self.prepared: list[nn.Module] = []
        # The same models without a wrapper.
        self.plain: list[nn.Module] = []

    def prepare(self, model: nn.Module, *, place: bool = True, evaluation_mode: bool = False) -> nn.Module:
        """The model to train with: a wrapper, or the model itself in a world of one, which synchronizes nothing."""
        if any(model is prepared for prepared in self.prepared):
            return model
        refuse_prepared(model, self.plain)
        # A model with parameters on several devices has been placed by the user.
        if place and len({parameter.device for parameter in model.parameters()}) <= 1:
            model.to(self._world.device)
        self._precision.wrap_forward(model)
        self._compiler.apply(model.module if isinstance(model, DistributedDataParallel) else model)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            self.prepared.append(model)
            self.plain.append(model)
            return model
        return self._connect(model)

    def _connect(self, model: nn.Module) -> nn.Module:
        ranks = self._world.engine_options
        if isinstance(model, DistributedDataParallel):
            self._remember(model, model, model.module)
            return model
        if self._world.num_processes == 1 and not self._world.is_elastic:
            options = {name: value for name, value in self._options.items() if name in _ENGINE}
            self._remember(model, synchronize_gradients(model, **ranks, **options), model)
            return model
        wrapper = PreparedDistributedDataParallel(model, **ranks, **self._options | self._fresh_policy)
        wrapper.local_training = self._local
        if self._hook:
            register_named_hook(wrapper, **self._hook)
        self._remember(wrapper, wrapper, model)
        return wrapper

    @property
    def _fresh_policy(self) -> dict[str, SyncPolicy]:
        """The policy with a new reduction where ranks come and go: new ones have no state of an earlier generation."""
        policy = self._options.get("policy")
        if not self._world.is_elastic or policy is None:
            return {}
        return {"policy": dataclasses.replace(policy, reduction=copy.deepcopy(policy.reduction))}

    def regroup(self) -> None:
        """Continue with the world's current ranks. Collective among them."""
        for wrapper in self.attachments:
            if not isinstance(wrapper, DistributedDataParallel):
                raise ConfigurationError(
                    f"{type(wrapper).__name__} cannot continue with other ranks: prepare the model itself, unwrapped"
                )
            wrapper.regroup(self._world.communicator, self._fresh_policy.get("policy", wrapper.current_policy()))

    def _remember(self, prepared: nn.Module, attachment: Accumulation, inner: nn.Module) -> None:
        self.prepared.append(prepared)
        self.plain.append(inner)
        self._attachments[id(prepared)] = self._attachments[id(inner)] = attachment

    def attachment_of(self, model: Any) -> Accumulation:
        """The engine of a prepared model, or of the model that was prepared."""
        inner = getattr(model, "_orig_mod", model)
        attachment = self._attachments.get(id(inner))
        if attachment is None:
            raise ConfigurationError(
                f"{type(model).__name__} was not prepared by this accelerator, so its gradients are not synchronized. "
                "Call model = accelerator.prepare(model) first"
            )
        return attachment

    @property
    def attachments(self) -> list[Accumulation]:
        return list({id(attachment): attachment for attachment in self._attachments.values()}.values())

    @property
    def synchronizers(self) -> list[Synchronizer]:
        return [each.synchronizer for each in self.attachments]

    def clear(self) -> None:
        """Take the engine off all models."""
        for synchronizer in self.synchronizers:
            synchronizer.detach()
        self._attachments.clear()
        self.prepared.clear()
        self.plain.clear()


def refuse_prepared(given: Any, prepared: Iterable[Any]) -> None:
    """Raise if ``given`` is what one of the prepared objects was made from."""
    if any(each is given for each in prepared):
        raise ConfigurationError(
            f"this {type(given).__name__} has been prepared already. Use the object that prepare() returned"
        )


def register_named_hook(
    model: DistributedDataParallel,
    comm_hook: Any = "no",
    comm_wrapper: Any = "no",
    comm_state_option: Mapping[str, Any] | None = None,
) -> None:
    """Have ``model`` reduce its buckets with the hook of that name, inside the wrapper of that name."""
    # Imported late: only needed here.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks = {
        "no": None,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers = {
        "no": lambda inner: inner,
        "fp16": default_hooks.fp16_compress_wrapper,
        "bf16": default_hooks.bf16_compress_wrapper,
    }
    name, hook = _named("comm_hook", comm_hook, hooks)
    _, wrap = _named("comm_wrapper", comm_wrapper, wrappers)
    if hook is not None:
        has_state = name.endswith("power_sgd")
        state = powerSGD_hook.PowerSGDState(None, **comm_state_option or {}) if has_state else None
        model.register_comm_hook(state, wrap(hook))


def _named(argument: str, value: Any, known: Mapping[str, Any]) -> tuple[str, Any]:
    name = str(getattr(value, "value", value)).lower()
    if name not in known:
        raise ConfigurationError(f"{argument} must be one of {', '.join(known)}, got {value!r}")
    return name, known[name]


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """The model as it was before ``prepare``; without autocast around its forward, or uncompiled, if so wished."""
    compiled: Any = getattr(model, "_orig_mod", model)
    inner = compiled
    while isinstance(inner, DistributedDataParallel | nn.parallel.DistributedDataParallel):
        inner = inner.module
    bare: nn.Module = getattr(inner, "_orig_mod", inner)
    if not keep_fp32_wrapper and "_gradsync_plain_forward" in vars(bare):
        del bare._gradsync_plain_forward
        del bare.forward
    if not keep_torch_compile:
        return bare
    # What was compiled around a wrapper is not what the model was.
    return model if inner is compiled else inner
