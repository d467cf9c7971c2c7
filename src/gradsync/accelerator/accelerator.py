"""The ``Accelerator``: turns a single-process training loop into one for many, with Accelerate's names and defaults."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from gradsync.accelerator.compat import Compatibility, register_accelerator
from gradsync.accelerator.compiling import chosen_compiler
from gradsync.accelerator.data_loader import PreparedDataLoader, prepare_data_loader, skip_first_batches
from gradsync.accelerator.elasticity import Elasticity, refuse_beside_elastic
from gradsync.accelerator.models import Precision, PreparedModels, extract_model_from_parallel, refuse_prepared
from gradsync.accelerator.numbered_windows import NumberedWindows
from gradsync.accelerator.optimizer import (
    Overlap,
    Overlapping,
    PreparedOptimizer,
    PreparedScheduler,
    take_local_steps,
)
from gradsync.accelerator.saving import Prepared, Saving
from gradsync.accelerator.settings import (
    DataLoaderConfiguration,
    ProfileKwargs,
    adopted,
    checked_rng_types,
    chosen_loaders,
    chosen_plugin,
    chosen_project,
    launched_settings,
    refuse_absent,
    require_steps,
    settings_of,
)
from gradsync.accelerator.windows import GradientState, ModelWindows
from gradsync.accelerator.world import World, connect, unmet
from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator
from gradsync.health.elastic import Elastic
from gradsync.observe import count
from gradsync.optim.local_steps import LocalSteps
from gradsync.parallel.accumulation import backward_through
from gradsync.parallel.clipping import clip_grad_norm_, clip_grad_value_, require_means_of, synchronizers_of

__all__ = ["Accelerator"]

Batch = TypeVar("Batch")


class Accelerator(Saving, Compatibility):
    """Prepares models, optimizers, loaders and schedulers for all processes, and runs windows of micro-batches.

    ::

        accelerator = Accelerator(gradient_accumulation_steps=8)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    Started by torchrun, mpirun or srun, it finds the other processes; otherwise it is a world of one, without a process
    group. ``communicator`` replaces all that. With ``shard_optimizer=True`` every process updates its share of the
    parameters, as :class:`~gradsync.ShardedOptimizer` does; with ``overlap="next-forward"`` every process updates all
    of them as soon as their means arrive, as :class:`~gradsync.OverlappedOptimizer` does. ``overlap="auto"`` picks the
    faster one. With ``local_steps="diloco:32"``, or a mapping with arguments of :class:`~gradsync.LocalSteps`, ranks
    train alone and merge their models after every 32 steps. With ``elastic=Elastic(…)`` ranks may be lost and new ones
    may join between two attempts: see :attr:`elastic`.

    Differences from Accelerate: a short last window is divided by its real length, each of several models has its own
    window, ``backward`` takes a weight, and misuse raises. docs/coming-from-accelerate.md lists all of them, with the
    switches.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        even_batches: bool = True,
        dispatch_batches: bool | None = None,
        communicator: Communicator | None = None,
        shard_optimizer: bool = False,
        overlap: Overlap | None = None,
        local_steps: str | Mapping[str, Any] | None = None,
        elastic: Elastic | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if not name.startswith("_") and name != "self"}
        refuse_absent(arguments)
        self._arguments = arguments
        settings = settings_of(kwargs_handlers)
        compiler = chosen_compiler(dynamo_backend, dynamo_plugin, kwargs_handlers)
        launched = launched_settings()
        self.project_configuration = chosen_project(project_config, project_dir)
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self._profile = ProfileKwargs(**settings["ProfileKwargs"])
        self.rng_types = checked_rng_types(rng_types)
        self.gradient_state = GradientState()
        self.windows = ModelWindows(
            chosen_plugin(gradient_accumulation_steps, gradient_accumulation_plugin, launched.steps),
            self.gradient_state,
        )
        self.dataloader_config = chosen_loaders(dataloader_config, split_batches, even_batches, dispatch_batches)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.overlapping = Overlapping(shards=shard_optimizer, overlap=overlap)
        if local_steps is not None:
            self.overlapping.refuse_local_steps(local_steps)
        self._local_steps = local_steps
        cpu = cpu or launched.cpu
        if elastic is None:
            options = settings["InitProcessGroupKwargs"]
            world = connect(read_environment(), cpu=cpu, communicator=communicator, **options)
        else:
            refuse_beside_elastic(
                shard_optimizer=shard_optimizer, overlap=overlap, local_steps=local_steps, communicator=communicator
            )
            world = unmet(read_environment(), cpu=cpu)
        super().__init__(world.communicator, world.device, world.environment)
        self.world = world
        self.precision = Precision(
            launched.mixed_precision if mixed_precision is None else mixed_precision,
            self.device,
            autocast=settings["AutocastKwargs"],
            scaler=settings["GradScalerKwargs"],
        )
        self.models = PreparedModels(
            world, self.precision, self.windows.local, compiler, settings["DistributedDataParallelKwargs"]
        )
        self.prepared = Prepared(models=self.models, precision=self.precision, windows=self.windows)
        self._elastic = None if elastic is None else Elasticity(elastic, self.prepared, [self, world])
        if world.is_process:
            register_accelerator(self, self.mixed_precision)
        self._choose_trackers(log_with, self.logging_dir)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the settings and the ranks, and has prepared nothing."""
        if self._elastic is not None:
            raise MisuseError("an Accelerator whose ranks come and go cannot be pickled. Make a new one there")
        if self._arguments["communicator"] is not None:
            raise MisuseError(
                "an Accelerator with a communicator of its own cannot be pickled: a communicator has no meaning "
                "elsewhere. Make a new Accelerator there"
            )
        return (_made_again, (self._arguments, self.world))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Accelerator":
        """Return the accelerator itself, as in Accelerate: a copied model or trainer goes on with it."""
        return self

    def __repr__(self) -> str:
        where = f"rank {self.process_index} of {self.num_processes} on {self.device}"
        settings = f"mixed_precision={self.mixed_precision!r}, {self.gradient_accumulation_steps=}".replace("self.", "")
        return f"Accelerator({where}, {count(len(self.models.attachments), 'model')} prepared, {settings})"

    @property
    def elastic(self) -> Elasticity:
        """The windows of an elastic training, whose ranks come and go."""
        if self._elastic is None:
            raise MisuseError("this accelerator has the ranks it began with. Pass elastic=gradsync.Elastic() to it")
        return self._elastic

    @property
    def local_steps(self) -> list[LocalSteps]:
        """The local steps of each prepared optimizer, with ``local_steps``; ``synchronize()`` before you evaluate."""
        return self.prepared.local

    @property
    def state(self) -> World:
        """Accelerate's name for what is called the world here."""
        return self.world

    @property
    def distributed_type(self) -> str:
        return self.world.distributed_type

    # -- preparing ---------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order and number, for all processes.

        Returns them in the same order. Other objects pass through. Objects that are already prepared are returned
        unchanged.
        """
        placed = [self.device_placement] * len(objects) if device_placement is None else list(device_placement)
        if len(placed) != len(objects):
            raise ConfigurationError(f"device_placement has {len(placed)} entries for {len(objects)} objects")
        results = list(objects)
        # Models move before optimizers look at their parameters, and schedulers follow optimizers.
        order: list[tuple[Any, Callable[[Any, bool], Any]]] = [
            (nn.Module, self.prepare_model),
            (Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
            ((LRScheduler, PreparedScheduler), lambda scheduler, _: self.prepare_scheduler(scheduler)),
        ]
        for kind, prepare_one in order:
            for number, each in enumerate(objects):
                if isinstance(each, kind):
                    results[number] = prepare_one(each, placed[number])
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model: moved, run under autocast, connected to the engine (not in ``evaluation_mode``)."""
        place = self.device_placement if device_placement is None else device_placement
        return self.models.prepare(model, place=place, evaluation_mode=evaluation_mode)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedDataLoader | NumberedWindows:
        """Prepare one loader: every process gets its share of the batches, on its device; elastic ones by the number of
        a window."""
        if slice_fn_for_dispatch is not None:
            raise ConfigurationError(
                "slice_fn_for_dispatch is not supported: batches are cut along their first dimension. Pass "
                "dispatch_batches=False, so that every process reads its own batches"
            )
        configuration = adopted(DataLoaderConfiguration, self.dataloader_config)
        put_on_device = self.device_placement if device_placement is None else device_placement
        if self._elastic is not None:
            return self._elastic.windows_of(
                data_loader, self.gradient_accumulation_steps, configuration.data_seed or 0, put_on_device
            )
        prepared = prepare_data_loader(
            data_loader,
            communicator=self.communicator,
            device=self.device,
            gradient_state=self.gradient_state,
            configuration=configuration,
            put_on_device=put_on_device,
        )
        if not any(prepared is each for each in self.prepared.loaders):
            self.prepared.loaders.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Prepare one optimizer. It steps only at the end of a window, and its state is on the device of its
        parameters."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        refuse_prepared(optimizer, [each for prepared in self.prepared.optimizers for each in prepared.originals])
        overlapped = self.overlapping.apply(optimizer, self.models.attachments)
        prepared = PreparedOptimizer(overlapped, self.windows, self.precision.scaler)
        prepared.originals.append(optimizer)
        self.prepared.optimizers.append(prepared)
        if self._local_steps is not None:
            made = take_local_steps(self._local_steps, prepared, self.models.prepared, self.local_steps)
            self.local_steps.append(made)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one scheduler, which moves when its optimizer has stepped, as far as the plugin says."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        refuse_prepared(scheduler, [prepared.scheduler for prepared in self.prepared.schedulers])
        every = self.prepared.optimizers
        followed = [each for each in every if getattr(scheduler, "optimizer", None) in (each, *each.originals)]
        per_process = self.windows.plugin.scheduler_steps == "per_process" and not self.dataloader_config.split_batches
        prepared = PreparedScheduler(
            scheduler,
            followed or every,
            self.windows,
            follows_optimizer=self.step_scheduler_with_optimizer,
            several=self.num_processes if per_process else None,
        )
        self.prepared.schedulers.append(prepared)
        return prepared

    # -- windows -----------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the window ends with the current, or last, micro-batch."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per window."""
        return self.windows.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        require_steps("gradient_accumulation_steps", steps)
        self.windows.num_steps = steps

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Run a micro-batch of these models. The last of a window synchronizes; optimizers and schedulers act there."""
        if not models:
            raise ConfigurationError("accumulate() needs the models that accumulate, as in accumulate(model)")
        return self.windows.micro_batch([self.models.attachment_of(model) for model in models])

    def window(self, batches: Iterable[Batch], *models: nn.Module) -> Iterator[Batch]:
        """``for batch in accelerator.window(batches, model):`` is one whole window, where its batches are known.

        Processes may have different numbers of batches in it, or none.
        """
        return self.windows.window([self.models.attachment_of(model) for model in models], batches)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards inside stay in this process. It is enough to wrap the backward. Optimizers may not step inside."""
        return self.models.attachment_of(model).synchronizer.switched(enabled=False)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards inside synchronize, also those of forwards that ran under ``no_sync``."""
        return self.models.attachment_of(model).force_sync()

    def backward(self, loss: torch.Tensor, weight: Any = None, **kwargs: Any) -> None:
        """``loss.backward()``, scaled if float16 is enabled.

        Inside ``accumulate`` the gradient of the window is the mean over its micro-batches, weighted by ``weight`` if
        given (the number of tokens or samples that the loss is the mean of). Outside it, gradients are divided by
        ``gradient_accumulation_steps`` and add up, as in Accelerate.
        """
        running = self.windows.running if self.windows.weighs else []
        if weight is not None and not running:
            raise MisuseError(
                "accelerator.backward(loss, weight=…) needs to know the window that the weight counts in. Run it "
                "inside accelerator.accumulate(model), with divide_by='window' (the default) in the plugin"
            )
        if running and weight is None and self.is_main_process:
            self.windows.warn_if_short()
        if self.precision.scaler is not None:
            loss = self.precision.scaler.scale(loss)
        padding = self.gradient_state.in_dataloader and self.gradient_state.active_dataloader.is_padding
        if running and not padding:
            backward_through(running, loss, weight, float(self.gradient_accumulation_steps), **kwargs)
        elif not running:
            share = 0.0 if padding else 1.0 / self.gradient_accumulation_steps
            loss.backward(None if share == 1.0 else torch.full_like(loss, share), **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the scaling of float16 training, before gradients are read."""
        scaler = self.precision.scaler
        if scaler is None:
            return
        named = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        for each in self.prepared.optimizers if optimizer is None else named:
            if isinstance(each, PreparedOptimizer):
                if not self.windows.local.includes(each.synchronizers):
                    require_means_of(each.synchronizers)
                each = each.optimizer
            scaler.unscale(each)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the averaged gradients so that their norm is at most ``max_norm``; returns the norm before."""
        listed = self._unscaled(parameters)
        if self.windows.local.includes(synchronizers_of(listed)):
            return nn.utils.clip_grad_norm_(listed, max_norm, norm_type)
        return clip_grad_norm_(listed, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of the averaged gradients to ±``clip_value``."""
        listed = self._unscaled(parameters)
        if self.windows.local.includes(synchronizers_of(listed)):
            nn.utils.clip_grad_value_(listed, clip_value)
        else:
            clip_grad_value_(listed, clip_value)

    def _unscaled(self, parameters: Any) -> list[torch.Tensor]:
        """``parameters``, and of all optimizers only theirs unscaled: another one's window may be unfinished."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        meant = {id(parameter) for parameter in listed}
        for optimizer in self.prepared.optimizers:
            if any(id(parameter) in meant for group in optimizer.param_groups for parameter in group["params"]):
                self.unscale_gradients(optimizer)
        return listed

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step did not take place: the scaler found gradients that are not finite, or ranks agreed to
        skip the window."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    # -- the rest ----------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        return self.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """torch's gradient scaler, with ``mixed_precision="fp16"``."""
        return None if self.precision.scaler is None else self.precision.scaler.scaler

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[None]:
        """Operations inside run in the precision that ``mixed_precision`` names, or as ``autocast_handler`` says."""
        changed = {} if autocast_handler is None else settings_of([autocast_handler])["AutocastKwargs"]
        return self.precision.autocast(changed if autocast_handler is not None else None)

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[torch.profiler.profile]:
        """Run torch's profiler; each process writes its trace where ``output_trace_dir`` says."""
        settings = self._profile if profile_handler is None else profile_handler
        with settings.build() as profiler:
            yield profiler
        if settings.output_trace_dir is not None:
            folder = Path(settings.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model as it was before ``prepare``; without autocast around its forward, or uncompiled, if so wished."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader whose first epoch begins after ``num_batches`` batches."""
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared; returns a None for each of ``objects``, to overwrite them with."""
        self.prepared.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    def end_training(self) -> None:
        """Finish all trackers and local steps, wait for all processes and close the process group, if this accelerator
        created it."""
        for each in self.local_steps:
            each.finish()
        self._finish_trackers()
        self.wait_for_everyone()
        self.world.close()


def _made_again(arguments: dict[str, Any], world: World) -> Accelerator:
    accelerator = Accelerator(**arguments)
    accelerator.world = world
    return accelerator
