"""The training loop: windows of micro-batches, weighted by their tokens, on gradsync's own Accelerator."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from gradsync.accelerator import Accelerator, DistributedDataParallelKwargs
from gradsync.engine import SyncPolicy
from gradsync.llm.batches import Batches, BatchPlan, validation_batches
from gradsync.llm.heartbeat import Heartbeat, Pulse
from gradsync.llm.interruption import Interruption
from gradsync.llm.model import build_model, count_targets, loss_of
from gradsync.llm.phases import Phases
from gradsync.llm.replicas import ReplicaProof, compare_replicas
from gradsync.llm.saving import Saving
from gradsync.llm.schedule import warmup_cosine
from gradsync.llm.settings import TrainSettings
from gradsync.llm.tokens import TokenFile
from gradsync.reduction import Cast, Mean
from gradsync.timeline import StepTimes, Timeline

__all__ = ["Listener", "Outcome", "StepRecord", "Trainer", "make_accelerator"]

DEFAULT_STEPS = 130
VALIDATION_BATCHES = 8
# On a GPU the device must be waited for to read times and losses, so several steps are read at once.
GPU_STEPS_A_RECORD = 10


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, or several that are read together, over all ranks."""

    step: int
    steps: int
    elapsed: float
    wall: float
    loss: float
    tokens: int
    gradient_norm: float
    learning_rate: float
    seconds: dict[str, float]
    timeline: StepTimes | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.wall if self.wall > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. ``signal`` is the one that stopped it, or 0."""

    step: int
    signal: int
    proof: ReplicaProof
    validation_loss: float | None
    notes: list[str] = field(default_factory=list)


class Listener(Protocol):
    """Hears of the run, on rank 0."""

    def began(self, trainer: "Trainer", notes: list[str]) -> None:
        """The first step is about to run."""

    def stepped(self, record: StepRecord) -> None:
        """A step is over, and known over all ranks."""

    def validated(self, step: int, loss: float) -> None:
        """The validation loss after ``step`` steps."""

    def saved(self, step: int) -> None:
        """A checkpoint has been written."""


class Trainer:
    """One run on this rank. Collective from beginning to end."""

    def __init__(
        self, settings: TrainSettings, accelerator: Accelerator, timeline: Timeline, tokens: TokenFile
    ) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.timeline = timeline
        self.data_description = tokens.description
        train, self._validation = tokens.split(at_least=settings.sequence_length + 1)
        world_size = accelerator.num_processes
        self.plan = BatchPlan(
            sequence_length=settings.sequence_length,
            global_batch=settings.micro_batch * settings.grad_accum * world_size,
            micro_batch=settings.micro_batch,
            seed=settings.seed,
        )
        torch.manual_seed(settings.seed)
        model: nn.Module = build_model(
            settings.model, vocab_size=tokens.vocab_size, sequence_length=settings.sequence_length
        )
        if settings.precision == "fp64":
            model = model.double()
        self.saving = Saving(settings, accelerator)
        self.plan, notes = self.saving.adopt(self.plan)
        self.notes: list[str] = notes
        self.batches = Batches(train, self.plan, accelerator.process_index, world_size)
        self.total_steps = _total_steps(settings, self.batches)
        optimizer = torch.optim.AdamW(
            _groups(model, settings.weight_decay), lr=settings.learning_rate, betas=(0.9, 0.95)
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(settings.warmup, self.total_steps))
        self.plain_model = model
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        self.step = self.saving.restore()
        self.phases = Phases(accelerator.device, self.timeline)
        self._heartbeat = Heartbeat(accelerator.world.communicator)

    @property
    def wire(self) -> str:
        """What carries the gradients, and why that."""
        return str(self.accelerator.models.handle_of(self.model).wire)

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self, listener: Listener | None = None) -> Outcome:
        """Train to the end, or until somebody is asked to stop; a checkpoint is written in both cases."""
        heard = listener if listener is not None and self.accelerator.is_main_process else None
        if heard is not None:
            heard.began(self, self.notes)
        signal, validation_loss = self._train(heard)
        if self.saving.latest != self.step:
            self._save(heard)
        if not signal:
            validation_loss = self.validate()
            if heard is not None:
                heard.validated(self.step, validation_loss)
        proof = compare_replicas(self.plain_model, self.accelerator.world.communicator)
        return Outcome(
            step=self.step, signal=signal, proof=proof, validation_loss=validation_loss, notes=list(self.notes)
        )

    def _train(self, heard: Listener | None) -> tuple[int, float | None]:
        """All steps. Returns the signal that has ended them, or 0, and the last validation loss."""
        records, validation_loss, signal = _Records(self), None, 0
        with Interruption() as interruption:
            while self.step < self.total_steps and not signal:
                pulse = self._train_step(interruption.signal, records)
                records.learn(pulse)
                self._hand_over(records, heard)
                signal = pulse.signal if pulse is not None else 0
                if not signal:
                    validation_loss = self._now_and_then(heard, validation_loss)
            last = self._heartbeat.read()
            records.learn(last)
            self._hand_over(records, heard, everything=True)
        if last is not None and self.step < self.total_steps:
            signal = signal or last.signal
        return signal, validation_loss

    def _train_step(self, signal: int, records: "_Records") -> Pulse | None:
        phase = self.phases.phase
        began = time.perf_counter()
        with phase("data"):
            batches = [self._placed(batch) for batch in self.batches.window(self.step)]
        total: torch.Tensor | float = 0.0
        tokens = 0
        for inputs, targets in self.accelerator.window(batches, self.model):
            with phase("forward"), self.accelerator.autocast():
                loss = loss_of(self.model(inputs), targets)
            count = count_targets(targets)
            with phase("backward"):
                self.accelerator.backward(loss, weight=count)
            total = total + loss.detach().double() * count
            tokens += count
        with phase("update"):
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
            rate = self.optimizer.param_groups[0]["lr"]
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.step += 1
        pulse = self._heartbeat.beat(total, tokens, signal)
        records.add(self.step, norm, rate, time.perf_counter() - began)
        return pulse

    def _placed(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.accelerator.device
        if device.type == "cpu":
            return batch
        inputs, targets = (tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)
        return inputs, targets

    def _hand_over(self, records: "_Records", heard: Listener | None, *, everything: bool = False) -> None:
        for record in records.ready(everything=everything):
            if heard is not None:
                heard.stepped(record)

    def _now_and_then(self, heard: Listener | None, validation_loss: float | None) -> float | None:
        if self.step % self.settings.checkpoint_every == 0 and self.step < self.total_steps:
            self._save(heard)
        if self.step % self.settings.validate_every == 0 and self.step < self.total_steps:
            validation_loss = self.validate()
            if heard is not None:
                heard.validated(self.step, validation_loss)
        return validation_loss

    def _save(self, heard: Listener | None) -> None:
        self.saving.save(self.step, self.plan)
        if heard is not None:
            heard.saved(self.step)

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over part of the validation text, shared out among the ranks."""
        accelerator = self.accelerator
        self.plain_model.eval()
        numbers = torch.zeros(2, dtype=torch.float64, device=accelerator.world.communicator.device)
        for batch in validation_batches(
            self._validation, self.plan, VALIDATION_BATCHES, accelerator.process_index, accelerator.num_processes
        ):
            inputs, targets = self._placed(batch)
            with accelerator.autocast():
                loss = loss_of(self.plain_model(inputs), targets)
            count = count_targets(targets)
            numbers += torch.tensor([loss.item() * count, count], dtype=torch.float64, device=numbers.device)
        self.plain_model.train()
        accelerator.world.communicator.all_reduce(numbers).wait()
        total, count = numbers.tolist()
        return total / count if count else float("nan")


class _Ran(NamedTuple):
    """A step as this rank saw it."""

    step: int
    norm: torch.Tensor
    rate: float
    wall: float
    seconds: dict[str, float] | None
    timeline: StepTimes | None


class _Records:
    """Steps that have run, until the heartbeat says what they were over all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self._steps_a_record = GPU_STEPS_A_RECORD if trainer.accelerator.device.type == "cuda" else 1
        self._timeline = trainer.timeline
        self._began = time.perf_counter()
        self._phases = trainer.phases
        self._waiting: list[_Ran] = []
        self._known: list[Pulse] = []

    def add(self, step: int, norm: torch.Tensor, rate: float, wall: float) -> None:
        """A step has run here. Where reading is free, times are read at once: they are this step's alone."""
        last, seconds = None, None
        if self._steps_a_record == 1:
            last, seconds = self._timeline.last, self._phases.take()
        self._waiting.append(_Ran(step, norm, rate, wall, seconds, last))

    def learn(self, pulse: Pulse | None) -> None:
        if pulse is not None:
            self._known.append(pulse)

    def ready(self, *, everything: bool) -> list[StepRecord]:
        """Records of the steps that are known by now."""
        count = len(self._known)
        if not count or (count < self._steps_a_record and not everything):
            return []
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        pulses, self._known = self._known, []
        tokens = sum(pulse.tokens for pulse in pulses)
        ran = taken[-1]
        timeline = self._timeline.last if ran.seconds is None else ran.timeline
        return [
            StepRecord(
                step=ran.step,
                steps=count,
                elapsed=time.perf_counter() - self._began,
                wall=sum(each.wall for each in taken),
                loss=sum(pulse.loss * pulse.tokens for pulse in pulses) / tokens if tokens else float("nan"),
                tokens=tokens,
                gradient_norm=float(ran.norm),
                learning_rate=ran.rate,
                seconds=self._phases.take() if ran.seconds is None else ran.seconds,
                timeline=timeline,
            )
        ]


def make_accelerator(
    settings: TrainSettings, *, cpu: bool = False, communicator: Any = None
) -> tuple[Accelerator, Timeline]:
    """An accelerator for the run, and the timeline that its engine will tell of every synchronization."""
    timeline = Timeline(keep=4 * GPU_STEPS_A_RECORD)
    reductions: dict[str, Callable[[], Any]] = {
        "mean": Mean,
        "bf16": lambda: Cast(torch.bfloat16),
        "fp16": lambda: Cast(torch.float16),
    }
    policy = SyncPolicy(bucket_cap_mb=settings.bucket_mb, reduction=reductions[settings.reduction](), observer=timeline)
    accelerator = Accelerator(
        mixed_precision=settings.precision if settings.precision in ("bf16", "fp16") else "no",
        cpu=cpu,
        kwargs_handlers=[DistributedDataParallelKwargs(policy=policy)],
        communicator=communicator,
    )
    return accelerator, timeline


def _total_steps(settings: TrainSettings, batches: Batches) -> int:
    if settings.epochs is not None:
        steps: int = max(1, round(settings.epochs * batches.windows_per_epoch))
        return steps
    return settings.steps if settings.steps is not None else DEFAULT_STEPS


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (biases, norms) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
