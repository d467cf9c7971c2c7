"""Resolves constructor arguments of an Accelerator that say the same thing in several ways."""

from collections.abc import Sequence
from typing import Any

from gradsync.accelerator.plugins import DataLoaderConfiguration, GradientAccumulationPlugin, require_steps
from gradsync.base.errors import ConfigurationError

__all__ = ["checked_rng_types", "chosen_loaders", "chosen_plugin"]


def checked_rng_types(rng_types: Sequence[Any] | None) -> list[str]:
    """What loaders synchronize: their generators."""
    names = ["generator"] if rng_types is None else [str(getattr(each, "value", each)) for each in rng_types]
    if names not in (["generator"], []):
        raise ConfigurationError(
            f"rng_types={names}: prepared loaders give all processes the same order and leave other random numbers "
            "alone. Call gradsync.utils.synchronize_rng_states(['torch']) at the start of an epoch for the rest"
        )
    return names


def chosen_plugin(steps: int, plugin: Any, launched: int | None) -> GradientAccumulationPlugin:
    """From a plugin of either library, or from a number: the launcher's, as in Accelerate, or the argument's."""
    if plugin is None:
        if launched is None:
            require_steps("gradient_accumulation_steps", steps)
        return GradientAccumulationPlugin(steps if launched is None else launched)
    chosen = GradientAccumulationPlugin.of(plugin)
    if steps not in (1, chosen.num_steps):
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} and a plugin with num_steps={chosen.num_steps}: pass one of them"
        )
    return chosen


def chosen_loaders(configuration: Any, split: bool, even: bool, dispatch: bool | None) -> DataLoaderConfiguration:
    """From a configuration of either library, or from single arguments."""
    if configuration is None:
        return DataLoaderConfiguration(split_batches=split, even_batches=even, dispatch_batches=dispatch)
    if split or not even or dispatch is not None:
        raise ConfigurationError(
            "split_batches, even_batches and dispatch_batches belong into dataloader_config when that is given"
        )
    return DataLoaderConfiguration.of(configuration)
