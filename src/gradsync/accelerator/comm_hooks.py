"""torch's communication hooks, by the names that Accelerate gives them."""

from collections.abc import Mapping
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.parallel.data_parallel import DistributedDataParallel

__all__ = ["register_named_hook"]


def register_named_hook(
    model: DistributedDataParallel, hook: Any, wrapper: Any, state_option: Mapping[str, Any]
) -> None:
    """Have ``model`` reduce its buckets with the hook of that name, inside the wrapper of that name."""
    # Imported late: nobody else needs them.
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
    chosen = _named("comm_hook", hook, hooks)
    wrap = _named("comm_wrapper", wrapper, wrappers)
    if chosen is not None:
        has_state = _name(hook).endswith("power_sgd")
        state = powerSGD_hook.PowerSGDState(None, **state_option) if has_state else None
        model.register_comm_hook(state, wrap(chosen))


def _name(value: Any) -> str:
    return str(getattr(value, "value", value)).lower()


def _named(argument: str, value: Any, known: Mapping[str, Any]) -> Any:
    name = _name(value)
    if name not in known:
        raise ConfigurationError(f"{argument} must be one of {', '.join(known)}, got {value!r}")
    return known[name]
