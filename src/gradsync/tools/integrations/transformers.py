"""``use(trainer)``: has one Trainer of transformers average gradients with gradsync.

A Trainer leaves wrapping, precision and backward to Accelerate. ``use`` changes the classes of two objects, the Trainer
and its ``accelerator``, to subclasses made here; nothing that belongs to a module or a class is replaced, and other
Trainers stay as they are. The loop, loaders, schedulers, checkpoints and logs remain those of transformers.

[Note: tokens of all ranks] A Trainer divides the loss of a micro-batch by the number of tokens in its window. With
``average_tokens_across_devices`` that number is of all ranks, gathered before each window, and the average of the ranks
is exact. Without, it is this rank's own, and torch's DDP averages means over different numbers of tokens as if they
were equal. Here the number then becomes the weight of the rank. It travels with the gradients, so the average is exact
and there is no collective more.
"""

from typing import Any, Unpack

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator
from gradsync.core.engine.policy import PolicySettings, SyncPolicy
from gradsync.parallel.data_parallel import DistributedDataParallel

__all__ = ["use"]

# A Trainer, and an Accelerator of Accelerate: classes that come after those of this module, and may be subclasses.
_Base: Any = object


def use(
    trainer: Any,
    *,
    communicator: Communicator | None = None,
    policy: SyncPolicy | None = None,
    **settings: Unpack[PolicySettings],
) -> Any:
    """Have ``trainer``, a ``transformers.Trainer`` or one of its subclasses, train with gradsync. Returns it.

    Call this before ``trainer.train()``. The keyword arguments are those of :class:`gradsync.DistributedDataParallel`:
    ``policy`` or its fields, such as ``reduction``, ``on_bad_step`` and ``replica_check``, and ``communicator``.
    Arguments of the ``TrainingArguments`` whose names begin with ``ddp_`` keep their meaning.

    Gradients are averaged over all tokens of a window, whatever ``average_tokens_across_devices`` is.
    """
    SyncPolicy.chosen(policy, settings, wrapper="gradsync.transformers.use")
    if not hasattr(trainer, "create_accelerator_and_postprocess"):
        raise ConfigurationError(
            f"gradsync.transformers.use() needs a transformers.Trainer, got {type(trainer).__name__}"
        )
    if isinstance(trainer, _TrainerOnGradsync):
        raise MisuseError("this Trainer uses gradsync already: call gradsync.transformers.use(trainer) once")
    if trainer.model_wrapped is not trainer.model:
        raise MisuseError(
            f"the model of this Trainer is already wrapped, in {type(trainer.model_wrapped).__name__}. Call "
            "gradsync.transformers.use(trainer) before trainer.train()"
        )
    options: dict[str, Any] = {"communicator": communicator, "policy": policy, **settings}
    _set_up(trainer.accelerator, options)
    trainer.__class__ = _mixed_into(_TrainerOnGradsync, type(trainer))
    trainer.gradsync_options = options
    return trainer


def _set_up(accelerator: Any, options: dict[str, Any]) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    parallel = accelerator.parallelism_config
    if (kind != "NO" and not kind.startswith("MULTI_")) or (parallel is not None and parallel.tp_enabled):
        raise ConfigurationError(
            f"gradsync takes the place of DistributedDataParallel, and this Trainer uses {kind} or tensor parallelism. "
            "Leave that out of its TrainingArguments and of the configuration of Accelerate"
        )
    accelerator.__class__ = _mixed_into(_AcceleratorOnGradsync, type(accelerator))
    accelerator.gradsync_options = options


def _mixed_into(mixin: type, kind: type) -> type:
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _TrainerOnGradsync(_Base):
    """What is different in a Trainer."""

    gradsync_options: dict[str, Any]
    # Of the Trainer.
    accelerator: Any
    args: Any

    def create_accelerator_and_postprocess(self) -> None:
        # A search for hyperparameters makes a new accelerator for each trial.
        super().create_accelerator_and_postprocess()
        _set_up(self.accelerator, self.gradsync_options)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One micro-batch; see [Note: tokens of all ranks]."""
        if num_items_in_batch is None or not self._counts_own_tokens or not isinstance(model, DistributedDataParallel):
            return super().training_step(model, inputs, num_items_in_batch)
        accelerator, tokens = self.accelerator, float(num_items_in_batch)
        accelerator.weighted = _WeightedBackward(model, tokens, self.current_gradient_accumulation_steps)
        try:
            # A window without tokens has a loss of zero, and not one divided by zero.
            return super().training_step(model, inputs, num_items_in_batch if tokens else num_items_in_batch + 1)
        finally:
            accelerator.weighted = None

    @property
    def _counts_own_tokens(self) -> bool:
        """Whether losses are divided by this rank's number of tokens in a window."""
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return bool(is_scaled) and not self.args.average_tokens_across_devices


class _WeightedBackward:
    """The backward of one of ``parts`` micro-batches, which together have ``tokens`` tokens on this rank.

    Their losses add up to a mean. The engine weighs micro-batches that are means themselves: ``parts`` times the loss.
    """

    def __init__(self, model: DistributedDataParallel, tokens: float, parts: int) -> None:
        self._model = model
        self._tokens = tokens
        self._parts = parts

    def run(self, loss: torch.Tensor, **options: Any) -> None:
        if self._tokens:
            self._model.backward(loss * self._parts, self._tokens / self._parts, **options)
        elif self._model.require_backward_grad_sync:
            # Nothing to weigh on this rank, and the others wait for it.
            self._model.synchronize()


class _AcceleratorOnGradsync(_Base):
    """What is different in the Accelerator of a Trainer."""

    gradsync_options: dict[str, Any]
    weighted: _WeightedBackward | None = None

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Placed, cast and compiled by Accelerate, and wrapped in gradsync's class.

        A model that Accelerate has prepared for evaluation is wrapped as well, when it is to be trained.
        """
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation_mode or not self.use_distributed or not is_trained or isinstance(model, DistributedDataParallel):
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return prepared
        module = super().prepare_model(model, device_placement, evaluation_mode=True)
        handler = self.ddp_handler
        given = {} if handler is None else handler.to_kwargs()
        device_ids = [self.local_process_index] if self.multi_device else None
        wrapped = DistributedDataParallel(module, device_ids=device_ids, **given, **self.gradsync_options)
        if handler is not None:
            handler.register_comm_hook(wrapped)
        # Accelerate looks for this mark on all that it has prepared.
        vars(wrapped)["_is_accelerate_prepared"] = True
        return wrapped

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        unwrapped: nn.Module = super().unwrap_model(inner, *args, **options)
        return unwrapped

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        if self.weighted is None:
            super().backward(loss, **options)
        else:
            self.weighted.run(loss if self.scaler is None else self.scaler.scale(loss), **options)
