"""What ``dynamo_backend`` and ``dynamo_plugin`` mean: prepared models are compiled in place, before they are wrapped.

In place, so that ``prepare`` returns the same kinds of objects as without a compiler, and saved models have the same
names.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradsync.accelerator.settings import TRUE, adopted
from gradsync.base.errors import ConfigurationError

__all__ = ["TorchDynamoPlugin", "chosen_compiler"]

_PREFIX = "ACCELERATE_DYNAMO_"


@dataclass(frozen=True)
class TorchDynamoPlugin:
    """Settings for compiling prepared models: the arguments of ``torch.compile``, and what is compiled.

    backend
        the compiler's name, in any case; ``"no"`` compiles nothing.
    use_regional_compilation
        compile every block of the model's lists of blocks by itself, and what is around them: it compiles faster, and
        parameters of a sharded or overlapped optimizer are waited for block by block.
    """

    backend: Any = "no"
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    @property
    def name(self) -> str:
        """The name of the backend, as torch knows it."""
        return str(getattr(self.backend, "value", self.backend)).rpartition(".")[2].lower()

    def apply(self, model: nn.Module) -> None:
        """Compile ``model`` in place, unless the user has compiled it, or a part of it."""
        if self.name in ("no", "none") or any(map(_is_compiled, model.modules())):
            return
        # Accelerate's name for torch's default, which torch refuses beside options.
        mode = None if self.mode == "default" else self.mode
        arguments = {
            "backend": self.name,
            "mode": mode,
            "fullgraph": bool(self.fullgraph),
            "dynamic": self.dynamic,
            "options": self.options,
            "disable": self.disable,
        }
        for region in _regions(model) if self.use_regional_compilation else [model]:
            _compile(region, arguments)


def _compile(region: nn.Module, arguments: Mapping[str, Any]) -> None:
    if not type(region).__module__.startswith("torch.nn."):
        region.compile(**arguments)
        return

    # The compiler skips the forward of torch's own modules, unless a function calls it that it compiles.
    def call(*args: Any, **kwargs: Any) -> Any:
        return region._call_impl(*args, **kwargs)

    region._compiled_call_impl = torch.compile(call, **arguments)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _regions(module: nn.Module) -> Iterable[nn.Module]:
    """The blocks of lists whose members are of one class, and the modules beside them; or all of it."""
    if _is_repeated(module):
        return list(module.children())
    if any(map(_is_repeated, module.modules())):
        return [region for child in module.children() for region in _regions(child)]
    return [module]


def _is_repeated(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1


def chosen_compiler(
    backend: Any, plugin: Any, handlers: Iterable[Any] | None, variables: Mapping[str, str] = os.environ
) -> TorchDynamoPlugin:
    """The plugin, of either library, from the arguments of an Accelerator or from ``accelerate launch``."""
    plugins = [each for each in handlers or () if type(each).__name__ == TorchDynamoPlugin.__name__]
    if plugin is not None:
        plugins.append(plugin)
    if backend is not None:
        plugins.append(TorchDynamoPlugin(backend))
    chosen = [adopted(TorchDynamoPlugin, each) for each in plugins]
    asked = [each for each in chosen if each.name not in ("no", "none")]
    if len(asked) > 1:
        raise ConfigurationError(
            f"two compilers were asked for, {asked[0].name!r} and {asked[1].name!r}: pass dynamo_backend or one "
            "TorchDynamoPlugin"
        )
    return (asked or chosen or [_launched(variables)])[0]


def _launched(variables: Mapping[str, str]) -> TorchDynamoPlugin:
    def is_on(name: str) -> bool | None:
        text = variables.get(_PREFIX + name)
        return None if text is None else text.strip().lower() in TRUE

    return TorchDynamoPlugin(
        backend=variables.get(_PREFIX + "BACKEND", "no"),
        mode=variables.get(_PREFIX + "MODE"),
        fullgraph=is_on("USE_FULLGRAPH"),
        dynamic=is_on("USE_DYNAMIC"),
        use_regional_compilation=is_on("USE_REGIONAL_COMPILATION"),
    )
