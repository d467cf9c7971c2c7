"""The training loop: windows of micro-batches, weighted by their tokens, on gradsync's own Accelerator."""

import hashlib
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from gradsync.accelerator import Accelerator, DistributedDataParallelKwargs, GradientAccumulationPlugin
from gradsync.accelerator.operations import gather_object
from gradsync.communicator import Communicator
from gradsync.core.engine import Fingerprints, SyncPolicy
from gradsync.core.engine.observer import Observers
from gradsync.core.reduction import reduction_by_name
from gradsync.health.elastic import Elastic
from gradsync.observe.recording import Recorder, loading
from gradsync.observe.timeline import StepTimes, Timeline
from gradsync.optim.local_steps import LocalSteps
from gradsync.tools.llm.batches import Batches, BatchPlan, MicroBatch, validation_batches
from gradsync.tools.llm.checkpointing import Saving
from gradsync.tools.llm.heartbeat import Heartbeat, Pulse
from gradsync.tools.llm.interruption import Interruption
from gradsync.tools.llm.model import build_model, count_targets, loss_of
from gradsync.tools.llm.phases import Phases
from gradsync.tools.llm.schedule import warmup_cosine
from gradsync.tools.llm.settings import TrainSettings
from gradsync.tools.llm.tokens import TokenFile

__all__ = ["Listener", "Outcome", "Records", "ReplicaProof", "StepRecord", "Trainer", "make_accelerator"]

DEFAULT_STEPS = 130
VALIDATION_BATCHES = 8
# On a GPU the device must be waited for to read times and losses, so several steps are read at once.
GPU_STEPS_A_RECORD = 10


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, or several that are read together, over all ranks."""

    step: int
    time: float
    loss: float
    tokens: int
    tokens_per_second: float
    gradient_norm: float
    learning_rate: float
    seconds: dict[str, float]
    timeline: StepTimes | None


@dataclass(frozen=True, kw_only=True)
class ReplicaProof:
    """The digests of all ranks' parameters."""

    digests: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return len(set(self.digests)) == 1

    def __str__(self) -> str:
        if len(self.digests) == 1:
            return f"one replica, digest {self.digests[0][:12]}"
        if self.equal:
            return f"all {len(self.digests)} replicas hold the same parameters, digest {self.digests[0][:12]}"
        return "REPLICAS DIFFER: " + ", ".join(f"rank {rank} {each[:12]}" for rank, each in enumerate(self.digests))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. ``signal`` is the one that stopped it, or 0."""

    step: int
    signal: int
    proof: ReplicaProof
    validation_loss: float | None


class Listener:
    """Hears of the run, on rank 0. This one says nothing about it."""

    def began(self, trainer: "Trainer", notes: list[str]) -> None:
        """The first step is about to run."""

    def stepped(self, record: StepRecord) -> None:
        """A step is over, and known over all ranks."""

    def validated(self, step: int, loss: float) -> None:
        """The validation loss after ``step`` steps."""

    def saved(self, step: int) -> None:
        """A checkpoint has been written."""

    def noted(self, step: int, text: str) -> None:
        """Something to remember has happened."""


class Trainer:
    """One run on this rank. Collective from beginning to end."""

    def __init__(
        self, settings: TrainSettings, accelerator: Accelerator, timeline: Timeline, tokens: TokenFile
    ) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.data_description = tokens.description
        train, self._validation = tokens.split(at_least=settings.sequence_length + 1)
        ranks = self.planned_ranks
        self.plan = BatchPlan(
            sequence_length=settings.sequence_length,
            global_batch=settings.micro_batch * settings.grad_accum * ranks,
            micro_batch=settings.micro_batch,
            seed=settings.seed,
        )
        torch.manual_seed(settings.seed)
        model = build_model(settings.model, vocab_size=tokens.vocab_size, sequence_length=settings.sequence_length)
        if settings.precision == "fp64":
            model = model.double()
        self.saving = Saving(settings, accelerator)
        self.plan, self.notes = self.saving.adopt(self.plan, ranks)
        self._tokens = train
        self.deal()
        self.total_steps = settings.steps or DEFAULT_STEPS
        if settings.epochs is not None:
            self.total_steps = max(1, round(settings.epochs * self.batches.windows_per_epoch))
        optimizer = torch.optim.AdamW(
            _groups(model, settings.weight_decay), lr=settings.learning_rate, betas=(0.9, 0.95)
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(settings.warmup, self.total_steps))
        self.plain_model = model
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        self._wire = str(accelerator.models.attachment_of(self.model).wire)
        self._local = self._make_local_steps(settings.local_steps)
        self.step = self.saving.restore()
        self.phases = Phases(accelerator.device, timeline)
        self._listener = Listener()
        self._validation_loss: float | None = None

    @property
    def planned_ranks(self) -> int:
        """How many ranks a window is planned for; it is the same window on any other number."""
        return self.accelerator.num_processes

    def deal(self) -> None:
        """Share windows out among the ranks there are now."""
        accelerator = self.accelerator
        self.batches = Batches(self._tokens, self.plan, accelerator.process_index, accelerator.num_processes)
        self._heartbeat = Heartbeat(accelerator.world.communicator)

    def _make_local_steps(self, every: int | None) -> LocalSteps | None:
        if every is None:
            return None
        local = LocalSteps(self.model, self.optimizer, every=every)
        self.accelerator.register_for_checkpointing(local)
        self._wire += f"; parameters take it, after every {every} steps"
        return local

    @property
    def wire(self) -> str:
        """What carries the gradients, and why that."""
        return self._wire

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self, listener: Listener | None = None) -> Outcome:
        """Train to the end, or until somebody is asked to stop; a checkpoint is written in both cases."""
        if listener is not None and self.accelerator.is_main_process:
            self._listener = listener
        self._listener.began(self, self.notes)
        signal = self._train()
        if self._local is not None:
            self._local.synchronize()
        if self.saving.latest != self.step:
            self._save()
        return self._conclude(signal)

    def _conclude(self, signal: int) -> Outcome:
        if not signal:
            self.validate()
        proof = compare_replicas(self.plain_model, self.accelerator.world.communicator)
        return Outcome(step=self.step, signal=signal, proof=proof, validation_loss=self._validation_loss)

    def _train(self) -> int:
        """All steps. Returns the signal that has ended them, or 0."""
        records, signal = Records(self, self._listener), 0
        with Interruption() as interruption:
            while self.step < self.total_steps and not signal:
                pulse = self._train_step(interruption.signal, records)
                records.learn(pulse)
                signal = pulse.signal if pulse is not None else 0
                if not signal and self.step < self.total_steps:
                    signal = self._now_and_then(records)
            last = self._heartbeat.read()
            records.learn(last, everything=True)
        if last is not None and self.step < self.total_steps:
            signal = signal or last.signal
        return signal

    def _train_step(self, signal: int, records: "Records") -> Pulse | None:
        phase = self.phases.phase
        began = time.perf_counter()
        with phase("data"), loading():
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

    def _placed(self, batch: MicroBatch) -> MicroBatch:
        device = self.accelerator.device
        if device.type == "cpu":
            return batch
        inputs, targets = (tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)
        return inputs, targets

    def _now_and_then(self, records: "Records") -> int:
        """Save, validate. Returns the signal that somebody has got meanwhile, or 0."""
        signal = 0
        if self.step % self.settings.checkpoint_every == 0:
            # Before it is saved: a run that goes on from here does not do this step again, and would never tell of it.
            pulse = self._heartbeat.read()
            records.learn(pulse, everything=True)
            signal = 0 if pulse is None else pulse.signal
            self._save()
        if self.step % self.settings.validate_every == 0:
            self.validate()
        return signal

    def _save(self) -> None:
        if self._local is not None:
            # A checkpoint is one model.
            self._local.synchronize()
        self.saving.save(self.step, self.plan)
        self._listener.saved(self.step)

    @torch.no_grad()
    def validate(self) -> None:
        """Measures the mean loss over part of the validation text, shared out among the ranks."""
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
        self._validation_loss = total / count if count else float("nan")
        self._listener.validated(self.step, self._validation_loss)


class Records:
    """Steps that have run, until the heartbeat says what they were over all ranks. Then the listener hears of them."""

    def __init__(self, trainer: Trainer, listener: Listener) -> None:
        self._steps_a_record = GPU_STEPS_A_RECORD if trainer.accelerator.device.type == "cuda" else 1
        self._phases = trainer.phases
        self._listener = listener
        self._began = time.perf_counter()
        self._waiting: list[_Ran] = []
        self._known: list[Pulse] = []

    def add(self, step: int, norm: torch.Tensor, rate: float, wall: float) -> None:
        """A step has run here. Where reading is free, times are read at once: they are this step's alone."""
        times = self._phases.take() if self._steps_a_record == 1 else None
        self._waiting.append(_Ran(step, norm, rate, wall, times))

    def learn(self, pulse: Pulse | None, *, everything: bool = False) -> None:
        """What the oldest step that waits was. A record is made of as many as belong together."""
        self._known += [] if pulse is None else [pulse]
        count = len(self._known)
        if not count or (count < self._steps_a_record and not everything):
            return
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        pulses, self._known = self._known, []
        ran, tokens, wall = taken[-1], sum(each.tokens for each in pulses), sum(each.wall for each in taken)
        seconds, timeline = ran.times or self._phases.take()
        record = StepRecord(
            step=ran.step,
            time=time.perf_counter() - self._began,
            loss=sum(each.loss * each.tokens for each in pulses) / tokens if tokens else float("nan"),
            tokens=tokens,
            tokens_per_second=tokens / wall if wall > 0 else 0.0,
            gradient_norm=float(ran.norm),
            learning_rate=ran.rate,
            seconds=seconds,
            timeline=timeline,
        )
        self._listener.stepped(record)


class _Ran(NamedTuple):
    """A step as this rank saw it."""

    step: int
    norm: torch.Tensor
    rate: float
    wall: float
    times: tuple[dict[str, float], StepTimes | None] | None


def compare_replicas(model: nn.Module, communicator: Communicator) -> ReplicaProof:
    """Every rank digests names and bits of its own parameters; all learn all digests. Collective."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return ReplicaProof(digests=tuple(gather_object([digest.hexdigest()], communicator=communicator)))


def make_accelerator(
    settings: TrainSettings, *, cpu: bool = False, recorder: Recorder | None = None, elastic: Elastic | None = None
) -> tuple[Accelerator, Timeline]:
    """An accelerator for the run, and the timeline that its engine will tell of every synchronization, as it tells the
    recorder."""
    timeline = Timeline(keep=4 * GPU_STEPS_A_RECORD)
    reduction = reduction_by_name(settings.reduction if settings.local_steps is None else "mean")
    policy = SyncPolicy(
        bucket_cap_mb=settings.bucket_mb,
        reduction=reduction,
        observer=timeline if recorder is None else Observers(timeline, recorder),
        on_veto=settings.on_veto,
        fingerprints=None if settings.fingerprints is None else Fingerprints(every=settings.fingerprints),
    )
    accelerator = Accelerator(
        mixed_precision=settings.precision if settings.precision in ("bf16", "fp16") else "no",
        cpu=cpu,
        shard_optimizer=settings.shard_optimizer,
        overlap=settings.overlap,
        elastic=elastic,
        # The schedule is made of windows, whatever the number of ranks.
        gradient_accumulation_plugin=GradientAccumulationPlugin(scheduler_steps="once"),
        kwargs_handlers=[DistributedDataParallelKwargs(policy=policy)],
    )
    return accelerator, timeline


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (biases, norms) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
