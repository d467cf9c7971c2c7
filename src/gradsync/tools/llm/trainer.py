"""The training loop: windows of micro-batches, weighted by their tokens, on gradsync's own Accelerator."""

import dataclasses
import hashlib
import math
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from gradsync.accelerator import Accelerator, DistributedDataParallelKwargs, GradientAccumulationPlugin
from gradsync.accelerator.operations import gather_object
from gradsync.accelerator.saving import restore_prepared, save_prepared
from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint import CheckpointFolder, Loaded
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import together
from gradsync.core.engine import ReplicaCheck, SyncPolicy
from gradsync.core.reduction import reduction_by_name
from gradsync.health.elastic import Elastic
from gradsync.observe.metrics import StepMetrics
from gradsync.observe.recording import Recorder, loading
from gradsync.tools.llm.model import build_model, count_targets, loss_of
from gradsync.tools.llm.settings import TrainSettings, option_of
from gradsync.tools.llm.step_records import StepRecord, StepRecords
from gradsync.tools.llm.tokens import Batches, BatchPlan, MicroBatch, TokenFile, validation_batches
from gradsync.tools.metrics import SinkPlace, open_sinks

__all__ = ["Listener", "Trainer", "TrainingOutcome", "make_accelerator"]

DEFAULT_STEPS = 130
VALIDATION_BATCHES = 8
ECHO_SECONDS = 2.0
# What metrics show of a record of a step.
SHOWN = ("loss", "tokens", "tokens_per_second", "gradient_norm", "learning_rate")
# What may not differ between a checkpoint and the run that goes on from it.
FIXED = ("model", "data", "tokenizer", "sequence_length", "seed", "precision")
# What may, but changes the numbers.
CHANGEABLE = (
    *("micro_batch", "grad_accum", "learning_rate", "warmup", "weight_decay", "clip", "steps", "epochs", "reduction"),
)


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
class TrainingOutcome:
    """How a run ended. ``signal`` is the one that stopped it, or 0."""

    step: int
    signal: int
    proof: ReplicaProof
    validation_loss: float | None

    @property
    def exit_code(self) -> int:
        """0 if all went well, 128 + n after signal n as in a shell, 1 if replicas differ."""
        return 128 + self.signal if self.signal else int(not self.proof.equal)


class Listener:
    """Callbacks of a run, on rank 0. These do nothing."""

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
        self, settings: TrainSettings, accelerator: Accelerator, recorder: Recorder, tokens: TokenFile
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
        self.saving = TrainingCheckpoints(settings, accelerator)
        self.plan, self.notes = self.saving.adopt(self.plan, ranks)
        self._tokens = train
        self.share_windows()
        self.total_steps = settings.steps or DEFAULT_STEPS
        if settings.epochs is not None:
            self.total_steps = max(1, round(settings.epochs * self.batches.windows_per_epoch))
        # Matrices decay, vectors (biases, norms) do not.
        decays: list[Any] = [[], []]
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            decays[parameter.dim() >= 2].append(parameter)
        groups = [
            {"params": decays[1], "weight_decay": settings.weight_decay},
            {"params": decays[0], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(settings.warmup, self.total_steps))
        self.plain_model = model
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        # Of the gradients, and why that one.
        self.transport = str(accelerator.models.attachment_of(self.model).transport)
        for local in accelerator.local_steps:
            self.transport += f"; parameters take it, after every {local.settings.every} steps"
        self.step = self.saving.restore()
        self._recorder = recorder
        self._metrics = StepMetrics(recorder, scaler=accelerator.scaler)
        # The number of this rank when its sinks were opened.
        self._metrics_rank: int | None = None
        self._listener = Listener()
        self._validation_loss: float | None = None

    @property
    def planned_ranks(self) -> int:
        """How many ranks a window is planned for; it is the same window on any other number."""
        return self.accelerator.num_processes

    def share_windows(self) -> None:
        """Share windows out among the ranks there are now."""
        ranks = self.accelerator
        self.batches = Batches(self._tokens, self.plan, ranks.process_index, ranks.num_processes)

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self, listener: Listener | None = None) -> TrainingOutcome:
        """Train to the end, or until a signal asks any rank to stop; a checkpoint is written in both cases."""
        if listener is not None and self.accelerator.is_main_process:
            self._listener = listener
        self._listener.began(self, self.notes)
        with self._metrics:
            self.open_metrics()
            signal = self._train()
            self.accelerator.prepared.synchronize()
            if self.saving.latest != self.step:
                self._save()
            return self._conclude(signal)

    def open_metrics(self) -> None:
        """Open the sinks of this rank, anew where its number has changed. Collective."""
        names, rank = self.settings.metrics, self.accelerator.process_index
        if names is None:
            return
        place = SinkPlace(
            folder=self.settings.run_folder,
            rank=rank,
            local_rank=self.accelerator.environment.local_rank,
            first_step=self.step + 1 if self.step else None,
        )

        def open_them() -> tuple[None, None]:
            if self._metrics_rank != rank:
                self._metrics.close()
                self._metrics.use(open_sinks(names, place))
                self._metrics_rank = rank
            return None, None

        together(self.accelerator.world.communicator, "open what --metrics names", open_them)

    def _conclude(self, signal: int) -> TrainingOutcome:
        """Validate, unless a signal has stopped the run, and compare the replicas."""
        if not signal:
            self.validate()
        proof = compare_replicas(self.plain_model, self.accelerator.world.communicator)
        return TrainingOutcome(step=self.step, signal=signal, proof=proof, validation_loss=self._validation_loss)

    def _new_records(self) -> StepRecords:
        # Of steps whose loss the other ranks have not told yet. On a GPU they are read with it: reading waits.
        self._measured: dict[int, dict[str, float]] = {}
        communicator, on_gpu = self.accelerator.world.communicator, self.accelerator.device.type == "cuda"
        return StepRecords(communicator, self._recorder, self._stepped, on_gpu=on_gpu)

    def _stepped(self, record: StepRecord) -> None:
        self._listener.stepped(record)
        if self._metrics.active:
            measured = self._measured.pop(record.step, None) or self._metrics.read()
            known = {f"training/{name}": getattr(record, name) for name in SHOWN}
            self._metrics.log(record.step, measured | known)

    def _train(self) -> int:
        """Run all steps. Returns the signal that has ended them, or 0."""
        self._records, signal = self._new_records(), 0
        with Interruption() as interruption:
            while self.step < self.total_steps and not signal:
                signal = self._train_step(interruption.signal)
                if not signal and self.step < self.total_steps:
                    signal = self._now_and_then()
            last = self._records.flush()
        return signal or (last if self.step < self.total_steps else 0)

    def _train_step(self, signal: int) -> int:
        """Run a step, and send it with the signal of this rank. Returns that of any rank in the step before."""
        began = time.perf_counter()
        with loading():
            batches = [self._placed(batch) for batch in self.batches.window(self.step)]
        total: torch.Tensor | float = 0.0
        tokens = 0
        for inputs, targets in self.accelerator.window(batches, self.model):
            with self.accelerator.autocast():
                loss = loss_of(self.model(inputs), targets)
            count = count_targets(targets)
            self.accelerator.backward(loss, weight=count)
            total = total + loss.detach().double() * count
            tokens += count
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self._metrics.active and self.accelerator.device.type == "cpu":
            self._measured[self.step] = self._metrics.read()
        answer = self._records.send(total, tokens, signal)
        self._records.add(self.step, norm, rate, time.perf_counter() - began)
        return answer

    def _placed(self, batch: MicroBatch) -> MicroBatch:
        if self.accelerator.device.type == "cpu":
            return batch
        inputs, targets = (each.pin_memory().to(self.accelerator.device, non_blocking=True) for each in batch)
        return inputs, targets

    def _now_and_then(self) -> int:
        """Save and validate when it is time. Returns the signal that any rank has received meanwhile, or 0."""
        signal = 0
        if self.step % self.settings.checkpoint_every == 0:
            # Before it is saved: a run that resumes here does not repeat this step, and would never record it.
            signal = self._records.flush()
            self._save()
        if self.step % self.settings.validate_every == 0:
            self.validate()
        return signal

    def _save(self) -> None:
        self.saving.save(self.step, self.plan)
        self._listener.saved(self.step)

    @torch.no_grad()
    def validate(self) -> None:
        """Measures the mean loss over part of the validation text, shared out among the ranks."""
        accelerator, communicator = self.accelerator, self.accelerator.world.communicator
        self.plain_model.eval()
        numbers = torch.zeros(2, dtype=torch.float64, device=communicator.device)
        ranks = accelerator.process_index, accelerator.num_processes
        for batch in validation_batches(self._validation, self.plan, VALIDATION_BATCHES, *ranks):
            inputs, targets = self._placed(batch)
            with accelerator.autocast():
                loss = loss_of(self.plain_model(inputs), targets)
            count = count_targets(targets)
            numbers += torch.tensor([loss.item() * count, count], dtype=torch.float64, device=numbers.device)
        self.plain_model.train()
        communicator.all_reduce(numbers).wait()
        total, count = numbers.tolist()
        self._validation_loss = total / count if count else float("nan")
        self._listener.validated(self.step, self._validation_loss)
        self._metrics.log(self.step, {"validation/loss": self._validation_loss})


def compare_replicas(model: nn.Module, communicator: Communicator) -> ReplicaProof:
    """Every rank digests names and bits of its own parameters; all learn all digests. Collective."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return ReplicaProof(digests=tuple(gather_object([digest.hexdigest()], communicator=communicator)))


def make_accelerator(
    settings: TrainSettings, recorder: Recorder, *, cpu: bool = False, elastic: Elastic | None = None
) -> Accelerator:
    """An accelerator for the run, whose steps are recorded."""
    policy = SyncPolicy(
        bucket_cap_mb=settings.bucket_mb,
        reduction=reduction_by_name(settings.reduction if settings.local_steps is None else "mean"),
        observer=recorder,
        on_bad_step=settings.on_bad_step,
        replica_check=None if settings.replica_check is None else ReplicaCheck(every=settings.replica_check),
    )
    return Accelerator(
        mixed_precision=settings.precision if settings.precision in ("bf16", "fp16") else "no",
        cpu=cpu,
        shard_optimizer=settings.shard_optimizer,
        overlap=settings.overlap,
        local_steps=settings.local_steps,
        elastic=elastic,
        # The schedule is made of windows, whatever the number of ranks.
        gradient_accumulation_plugin=GradientAccumulationPlugin(scheduler_steps="once"),
        kwargs_handlers=[DistributedDataParallelKwargs(policy=policy)],
    )


def warmup_cosine(warmup: int, total: int, *, floor: float = 0.1) -> Callable[[int], float]:
    """The factor for step ``n`` of ``total``: reaches 1 after ``warmup`` steps and ``floor`` at the end."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1, total - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


class Interruption:
    """While entered, the first SIGINT or SIGTERM requests a stop after the step; one seconds later acts as usual.

    Not one that comes at once: a terminal signals all processes, and a launcher passes its own signal on to the ranks.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._noted_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal:
            self.signal, self._noted_at = number, now
        elif now - self._noted_at > ECHO_SECONDS:
            self.__exit__()
            signal.raise_signal(number)


class TrainingCheckpoints:
    """The checkpoints of one run, in ``checkpoints`` inside its folder."""

    def __init__(self, settings: TrainSettings, accelerator: Accelerator) -> None:
        self._settings = settings
        self._accelerator = accelerator
        self.open()
        self.loaded: Loaded | None = self._folder.load() if settings.resume else None
        self.latest: int | None = None if self.loaded is None else self.loaded.step

    def open(self) -> None:
        """Open the folder for the ranks that there are now."""
        folder, communicator = self._settings.run_folder / "checkpoints", self._accelerator.world.communicator
        self._folder = CheckpointFolder(folder, communicator, keep=self._settings.keep)

    def adopt(self, plan: BatchPlan, ranks: int) -> tuple[BatchPlan, list[str]]:
        """The plan to train by on ``ranks`` ranks, with notes: a resumed run keeps its global batch."""
        loaded = self.loaded
        if loaded is None:
            resumes = self._settings.resume
            return plan, ["nothing to resume from: the run begins at its first step"] if resumes else []
        before, now, global_batch = loaded.facts["settings"], self._settings.as_json(), loaded.facts["global_batch"]
        other = [name for name in FIXED + CHANGEABLE if before.get(name) != now[name]]
        for name in other:
            if name in FIXED:
                raise ConfigurationError(
                    f"the checkpoint in {self._settings.run_folder} is of a run with {option_of(name)} "
                    f"{before.get(name)}, and this one has {now[name]}. Resume with the former value, or choose "
                    "another --run-folder"
                )
        notes = [*loaded.notes, f"resumed from step {loaded.step}"]
        if ranks != loaded.world_size:
            notes.append(
                f"the checkpoint was written by {loaded.world_size} ranks, this run has {ranks}: windows keep their "
                f"{global_batch} sequences, each rank takes another share of them, and random numbers of dropout differ"
            )
            plan = dataclasses.replace(plan, global_batch=global_batch)
            other = [name for name in other if name != "grad_accum"]
        return plan, notes + [f"{option_of(name)} was {before.get(name)} and is {now[name]} now" for name in other]

    def restore(self) -> int:
        """Bring everything prepared into the state of the checkpoint; returns its step, or 0."""
        loaded, accelerator, step = self.loaded, self._accelerator, self.latest or 0
        if loaded is None or not restore_prepared(accelerator.prepared, loaded, accelerator.num_processes):
            # Different numbers on every rank, the same ones whenever this step is resumed on this rank.
            seed = self._settings.seed + 7919 * (accelerator.process_index + 1) + step
            torch.manual_seed(seed)
            random.seed(seed)
        return step

    def save(self, step: int, plan: BatchPlan) -> None:
        """Write a checkpoint of the state between two steps. Collective."""
        settings = self._settings.as_json()
        facts = {"settings": settings, "global_batch": plan.global_batch, "torch": torch.__version__}
        save_prepared(self._accelerator.prepared, self._folder, step=step, facts=facts)
        self.latest = step
