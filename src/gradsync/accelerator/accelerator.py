"""``Accelerator``: a training loop for one process becomes one for many, with Accelerate's names and defaults."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from gradsync.accelerator import operations
from gradsync.accelerator.data_loader import PreparedDataLoader, prepare_data_loader, skip_first_batches
from gradsync.accelerator.environment import read_environment
from gradsync.accelerator.gradient_state import GradientState
from gradsync.accelerator.handlers import settings_of
from gradsync.accelerator.model_windows import ModelWindows
from gradsync.accelerator.optimizer import PreparedOptimizer
from gradsync.accelerator.plugins import DataLoaderConfiguration, GradientAccumulationPlugin
from gradsync.accelerator.precision import Precision, plain_forward
from gradsync.accelerator.preparation import PreparedModels
from gradsync.accelerator.process_control import ProcessControl
from gradsync.accelerator.scheduler import PreparedScheduler
from gradsync.accelerator.state_saving import Prepared, has_checkpoint, load_prepared, save_prepared
from gradsync.accelerator.world import World, connect
from gradsync.checkpoint import CheckpointFolder
from gradsync.clipping import clip_grad_norm_, clip_grad_value_
from gradsync.communicator import Communicator
from gradsync.data_parallel import DistributedDataParallel
from gradsync.engine.backward_watch import tensors_in
from gradsync.engine.clipping import require_means_of, synchronizers_of
from gradsync.errors import ConfigurationError, MisuseError
from gradsync.wrap.accumulation import backward_through

__all__ = ["Accelerator"]

Batch = TypeVar("Batch")


class Accelerator(ProcessControl):
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

    Started by torchrun, mpirun or srun it finds the other processes; otherwise it is a world of one, without a process
    group. ``communicator`` replaces all that.

    Different from Accelerate: a short last window is divided by its real length, several models have a window each,
    ``backward`` takes a weight, and misuse raises. docs/coming-from-accelerate.md has all of it, with the switches.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        *,
        even_batches: bool = True,
        dispatch_batches: bool | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        settings = settings_of(kwargs_handlers)
        self.gradient_state = GradientState()
        self.windows = ModelWindows(
            _plugin(gradient_accumulation_steps, gradient_accumulation_plugin), self.gradient_state
        )
        self.dataloader_config = _loader_configuration(dataloader_config, split_batches, even_batches, dispatch_batches)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        world = connect(read_environment(), cpu=cpu, communicator=communicator, **settings["InitProcessGroupKwargs"])
        super().__init__(world.communicator, world.device, world.environment)
        self.world = world
        self.precision = Precision(
            mixed_precision,
            self.device,
            autocast=settings["AutocastKwargs"],
            scaler=settings["GradScalerKwargs"],
        )
        self.models = PreparedModels(
            world, self.precision, self.windows.local, settings["DistributedDataParallelKwargs"]
        )
        if self.precision.scaler is not None:
            models = self.models
            self.precision.scaler.synchronizers = lambda: [each.synchronizer for each in models.attachments]
        self.prepared = Prepared(models=self.models, precision=self.precision, windows=self.windows)

    @property
    def state(self) -> World:
        """Under this name Accelerate keeps what here is the world."""
        return self.world

    # -- preparing ---------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Models, optimizers, loaders and schedulers, in any order and number, made ready for all processes.

        Returns them in the same order. Other objects pass through. What is prepared already stays as it is.
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
        """One model: moved, run under autocast, connected to the engine (not in ``evaluation_mode``)."""
        place = self.device_placement if device_placement is None else device_placement
        return self.models.prepare(model, place=place, evaluation_mode=evaluation_mode)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> PreparedDataLoader:
        """One loader: every process gets its share of the batches, on its device."""
        if isinstance(data_loader, PreparedDataLoader):
            return data_loader
        prepared = prepare_data_loader(
            data_loader,
            communicator=self.communicator,
            device=self.device,
            gradient_state=self.gradient_state,
            configuration=self.dataloader_config,
            put_on_device=self.device_placement if device_placement is None else device_placement,
        )
        self.prepared.loaders.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """One optimizer, which will step at the end of a window. Its state is wherever its parameters are."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        _refuse_again(optimizer, [prepared.optimizer for prepared in self.prepared.optimizers])
        prepared = PreparedOptimizer(optimizer, self.windows, self.precision.scaler)
        self.prepared.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """One scheduler, which will move when its optimizer has stepped; how far, says the plugin."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        _refuse_again(scheduler, [prepared.scheduler for prepared in self.prepared.schedulers])
        every = self.prepared.optimizers
        followed = [each for each in every if getattr(scheduler, "optimizer", None) in (each, each.optimizer)]
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
        """Micro-batches a window."""
        return self.windows.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        GradientAccumulationPlugin(steps)
        self.windows.num_steps = steps

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch of these models. The last of a window synchronizes; optimizers and schedulers act there."""
        if not models:
            raise ConfigurationError("accumulate() needs the models that accumulate, as in accumulate(model)")
        return self.windows.micro_batch([self.models.attachment_of(model) for model in models])

    def window(self, batches: Iterable[Batch], *models: nn.Module) -> Iterator[Batch]:
        """``for batch in accelerator.window(batches, model):`` is one whole window, where its batches are known.

        Processes may have different numbers of batches in it, or none.
        """
        return self.windows.window([self.models.attachment_of(model) for model in models], batches)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards in here stay in this process. Around the backward is enough. Optimizers may not step."""
        return self.models.attachment_of(model).synchronizer.switched(enabled=False)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards in here synchronize, also those of forwards that ran under ``no_sync``."""
        return self.models.attachment_of(model).force_sync()

    def backward(self, loss: torch.Tensor, weight: Any = None, **kwargs: Any) -> None:
        """``loss.backward()``, scaled for float16 where that is on.

        Inside ``accumulate`` the gradient of the window is the mean over its micro-batches, weighted by ``weight`` (the
        tokens or samples the loss is the mean of) where given. Outside it, gradients are divided by
        ``gradient_accumulation_steps`` and add up, as in Accelerate.
        """
        running = self.windows.running if self.windows.weighs else []
        if weight is not None and not running:
            raise MisuseError(
                "accelerator.backward(loss, weight=…) needs to know the window that the weight counts in. Run it "
                "inside accelerator.accumulate(model), with divide_by='window' (the default) in the plugin"
            )
        if running and weight is None and self.is_main_process:
            self.windows.tell_if_short()
        if self.precision.scaler is not None:
            loss = self.precision.scaler.scale(loss)
        padding = self.gradient_state.in_dataloader and self.gradient_state.active_dataloader.is_padding
        if running and not padding:
            backward_through(running, loss, weight, **kwargs)
        elif not running:
            share = 0.0 if padding else 1.0 / self.gradient_accumulation_steps
            loss.backward(None if share == 1.0 else torch.full_like(loss, share), **kwargs)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Processes in here may have different numbers of batches; those that run out shadow the others."""
        if even_batches is not None and not self.prepared.loaders:
            raise ConfigurationError("even_batches changes prepared loaders, and none has been prepared")
        wrapped: list[Joinable] = [each for each in joinables if isinstance(each, DistributedDataParallel)]
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self.prepared.loaders:
                    stack.enter_context(loader.evening(even_batches))
            if wrapped:
                self.windows.joining = True
                stack.callback(setattr, self.windows, "joining", False)
                stack.enter_context(Join(wrapped, enable=True, throw_on_early_termination=False))
            yield

    # -- gradients ---------------------------------------------------------------------------------------------

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the scaling of float16 training, before gradients are looked at."""
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
        """Whether the scaler found gradients that are not finite, so that the last step did not take place."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    # -- tensors over processes --------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, one after the other along the first dimension; also in nested structures."""
        return operations.gather(self.communicator, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """:meth:`gather` without the samples that only completed the last batch: each sample of the data once."""
        state = self.gradient_state
        return operations.gather_for_metrics(self.communicator, input_data, state, objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, or mean, of tensors over all processes."""
        if reduction == "mean":
            self.windows.local.averaged(tensors_in(tensor))
        return operations.reduce(self.communicator, tensor, reduction, scale)  # type: ignore[arg-type]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors made as long in ``dim`` as the longest of all processes."""
        return operations.pad_across_processes(self.communicator, tensor, dim, pad_index, pad_first)

    # -- saving ------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | Path) -> Path:
        """Write everything prepared into ``output_dir``: also in the middle of a window, also in an epoch.

        An older checkpoint there stays until the new one is whole. All processes must call it.
        """
        return save_prepared(self.prepared, CheckpointFolder(output_dir, self.communicator))

    def has_state(self, input_dir: str | Path) -> bool:
        """Whether :meth:`save_state` has written a checkpoint there. All processes must call it."""
        return has_checkpoint(self.communicator, input_dir)

    def load_state(self, input_dir: str | Path) -> None:
        """Go on where :meth:`save_state` was called, with the same objects prepared in the same order.

        A damaged checkpoint is noticed, and the one before it taken; the main process says so.
        """
        for note in load_prepared(self.prepared, self.communicator, input_dir):
            self.print(note)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these too. They need ``state_dict`` and ``load_state_dict``."""
        for each in objects:
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise ConfigurationError(
                    f"{type(each).__name__} cannot be saved: it needs state_dict() and load_state_dict()"
                )
        self.prepared.others.extend(objects)

    # -- the rest ----------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        return self.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """torch's gradient scaler, with ``mixed_precision="fp16"``."""
        return None if self.precision.scaler is None else self.precision.scaler.scaler

    def autocast(self, *_: Any) -> AbstractContextManager[None]:
        """Operations in here run in the precision that ``mixed_precision`` names."""
        return self.precision.autocast()

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The model as it was before ``prepare``; without autocast around its forward if so wished."""
        compiled: Any = getattr(model, "_orig_mod", model)
        inner: nn.Module = compiled.module if isinstance(compiled, DistributedDataParallel) else compiled
        return inner if keep_fp32_wrapper else plain_forward(inner)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader whose first epoch begins after ``num_batches`` batches."""
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared; returns a None for each of ``objects``, to overwrite them with."""
        self.models.clear()
        self.windows.forget()
        kept = self.prepared
        for each in (kept.optimizers, kept.schedulers, kept.loaders, kept.others):
            each.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    def end_training(self) -> None:
        """Wait for everyone and close the process group, if this accelerator has made it."""
        self.wait_for_everyone()
        self.world.close()


def _refuse_again(given: Any, prepared: Iterable[Any]) -> None:
    if any(each is given for each in prepared):
        raise ConfigurationError(
            f"this {type(given).__name__} has been prepared already. Use the object that prepare() returned"
        )


def _plugin(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    if plugin is None:
        return GradientAccumulationPlugin(steps)
    plugin = GradientAccumulationPlugin.of(plugin)
    if steps not in (1, plugin.num_steps):
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} and a plugin with num_steps={plugin.num_steps}: pass one of them"
        )
    return plugin


def _loader_configuration(
    configuration: DataLoaderConfiguration | None, split: bool, even: bool, dispatch: bool | None
) -> DataLoaderConfiguration:
    if configuration is None:
        return DataLoaderConfiguration(split_batches=split, even_batches=even, dispatch_batches=dispatch)
    if split or not even or dispatch is not None:
        raise ConfigurationError(
            "split_batches, even_batches and dispatch_batches belong into dataloader_config when that is given"
        )
    return DataLoaderConfiguration.of(configuration)
