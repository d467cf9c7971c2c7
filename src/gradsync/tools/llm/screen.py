"""A run on the screen: a progress bar in a terminal, plain lines elsewhere. Rank 0 only."""

import statistics
import time
from collections import Counter
from typing import Any

from gradsync.observe.charts.numbers import count
from gradsync.observe.explain import Explanation
from gradsync.observe.explain.explanation import NAMES, gained
from gradsync.tools.llm.phases import PHASES
from gradsync.tools.llm.trainer import Listener, Outcome, StepRecord, Trainer

__all__ = ["Screen"]

# Without a terminal a line now and then is enough for a log file.
SECONDS_BETWEEN_LINES = 10.0
SMOOTHING = 0.9


class Screen(Listener):
    """Shows loss, tokens a second, time left and the share of time that was lost to synchronization."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console if console is not None else Console()
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/bold]"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("[dim]{task.fields[lost]}[/dim]"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", start=False, loss="…", speed="", lost="")
        self._line_due = 0.0
        self._total = self._first = 0
        self._wire = ""
        self._seconds: Counter[str] = Counter()
        self._loss: float | None = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._speeds: list[float] = []
        self._began = time.perf_counter()

    # -- what the trainer tells --------------------------------------------------------------------------------

    def began(self, trainer: Trainer, notes: list[str]) -> None:
        settings, accelerator, plan = trainer.settings, trainer.accelerator, trainer.plan
        millions = trainer.plain_model.parameter_count / 1e6
        self.console.print(
            f"[bold]gradsync train[/bold]: {settings.model}, {millions:.2f}M parameters, {settings.precision}; "
            f"{count(accelerator.num_processes, 'rank')} on {accelerator.device.type}; "
            f"windows of {plan.global_batch} sequences × {plan.sequence_length} tokens",
            highlight=False,
        )
        for note in notes:
            self.console.print(f"  {note}", highlight=False, style="yellow")
        self._total, self._first = trainer.total_steps, trainer.step
        self._wire = trainer.wire
        self._began = time.perf_counter()
        self._progress.start()
        self._progress.reset(self._task, total=self._total, completed=trainer.step)

    def stepped(self, record: StepRecord) -> None:
        self._seconds.update(record.seconds)
        self._speeds.append(record.tokens_per_second)
        self.last_loss = record.loss
        if self.first_loss is None:
            self.first_loss = record.loss
        self._loss = record.loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * record.loss
        loss, speed = f"{self._loss:.3f}", f"{self.speed:,.0f} tokens/s"
        lost = f"{100 * self.shares['synchronization']:.1f} % lost to sync"
        self._progress.update(self._task, completed=record.step, loss=loss, speed=speed, lost=lost)
        if self._progress.disable and (self.elapsed >= self._line_due or record.step == self._total):
            self._line_due = self.elapsed + SECONDS_BETWEEN_LINES
            self._line(f"step {record.step}/{self._total}  loss {loss}  {speed}  {lost}")

    def validated(self, step: int, loss: float) -> None:
        self._line(f"step {step}: validation loss {loss:.4f}")

    def saved(self, step: int) -> None:
        self._line(f"step {step}: checkpoint written")

    def noted(self, step: int, text: str) -> None:
        self._line(f"step {step}: {text}")

    def stop(self) -> None:
        """Show nothing any more."""
        self._progress.stop()

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, style="dim")

    # -- what it knows -----------------------------------------------------------------------------------------

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's share of the time, from 0 to 1."""
        total = sum(self._seconds.values())
        return {name: self._seconds[name] / total if total else 0.0 for name in PHASES}

    @property
    def speed(self) -> float:
        """The median of tokens a second."""
        return statistics.median(self._speeds) if self._speeds else 0.0

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def summarize(self, outcome: Outcome, report: str, explanation: Explanation | None = None) -> None:
        """The table at the end."""
        from rich.markup import escape
        from rich.table import Table

        ran = f"{outcome.step - self._first} in {self.elapsed:.0f} s"
        rows = {"steps": ran if not self._first else f"{ran}, from step {self._first} to {outcome.step}"}
        if self.first_loss is not None and self.last_loss is not None:
            rows["training loss"] = f"{self.first_loss:.4f} → {self.last_loss:.4f}"
        if outcome.validation_loss is not None:
            rows["validation loss"] = f"{outcome.validation_loss:.4f}"
        rows["throughput"] = f"{self.speed:,.0f} tokens/s (median)"
        shares = self.shares
        if explanation is not None:
            step = explanation.split.mean.step
            shares = {NAMES.get(name, name): seconds / step for name, seconds in explanation.parts()}
        rows["time"] = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        if explanation is not None and explanation.advice:
            best = explanation.advice[0]
            rows["first advice"] = escape(f"{gained(best)}: {best.cause} → {best.change}")
        rows["wire"] = self._wire
        style = "green" if outcome.proof.equal else "bold red"
        rows["replicas"] = f"[{style}]{outcome.proof}[/{style}]"
        rows["report"] = escape(report)
        table = Table(show_header=False, box=None, padding=(0, 2), title="summary", title_justify="left")
        for name, value in rows.items():
            table.add_row(f"[dim]{name}[/dim]", value)
        self._progress.stop()
        self.console.print(table, highlight=False)
