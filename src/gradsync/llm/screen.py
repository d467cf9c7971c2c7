"""A run on the screen: a progress bar in a terminal, plain lines elsewhere. Rank 0 only."""

import statistics
import time
from collections import Counter
from typing import Any, Protocol

from gradsync.llm.phases import PHASES
from gradsync.llm.trainer import Outcome, StepRecord, Trainer

__all__ = ["Screen"]

# Without a terminal a line now and then is enough for a log file.
SECONDS_BETWEEN_LINES = 10.0
SMOOTHING = 0.9


class _Display(Protocol):
    def update(self, step: int, total: int, words: dict[str, str]) -> None: ...

    def line(self, text: str) -> None: ...

    def close(self) -> None: ...


class Screen:
    """Shows loss, tokens a second, time left and the share of time that was lost to synchronization."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console

        self.console = console if console is not None else Console()
        self._display: _Display | None = None
        self._total = 0
        self._wire = ""
        self._seconds: Counter[str] = Counter()
        self._loss: float | None = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._speeds: list[float] = []
        self._began = time.perf_counter()

    # -- what the trainer tells --------------------------------------------------------------------------------

    def began(self, trainer: Trainer, notes: list[str]) -> None:
        settings, accelerator = trainer.settings, trainer.accelerator
        parameters = sum(parameter.numel() for parameter in trainer.plain_model.parameters())
        plan = trainer.plan
        self.console.print(
            f"[bold]gradsync train[/bold]: {settings.model}, {parameters / 1e6:.2f}M parameters, {settings.precision}; "
            f"{accelerator.num_processes} {'rank' if accelerator.num_processes == 1 else 'ranks'} on "
            f"{accelerator.device.type}; windows of {plan.global_batch} sequences × {plan.sequence_length} tokens",
            highlight=False,
        )
        for note in notes:
            self.console.print(f"  {note}", highlight=False, style="yellow")
        self._total = trainer.total_steps
        self._wire = trainer.wire
        self._display = _Bar(self.console, trainer) if self.console.is_terminal else _Lines(self.console)
        self._began = time.perf_counter()

    def stepped(self, record: StepRecord) -> None:
        self._seconds.update(record.seconds)
        self._speeds.append(record.tokens_per_second)
        self.last_loss = record.loss
        if self.first_loss is None:
            self.first_loss = record.loss
        self._loss = record.loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * record.loss
        if self._display is not None:
            words = {
                "loss": f"{self._loss:.3f}",
                "speed": f"{self.speed:,.0f} tokens/s",
                "lost": f"{100 * self.shares['synchronization']:.1f} % lost to sync",
            }
            self._display.update(record.step, self._total, words)

    def validated(self, step: int, loss: float) -> None:
        if self._display is not None:
            self._display.line(f"step {step}: validation loss {loss:.4f}")

    def saved(self, step: int) -> None:
        if self._display is not None:
            self._display.line(f"step {step}: checkpoint written")

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

    def close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None

    def summarize(self, outcome: Outcome, report: str | None) -> None:
        """The table at the end."""
        from rich.table import Table

        self.close()
        table = Table(show_header=False, box=None, padding=(0, 2), title="summary", title_justify="left")
        for name, value in self._rows(outcome, report):
            table.add_row(f"[dim]{name}[/dim]", value)
        self.console.print(table, highlight=False)

    def _rows(self, outcome: Outcome, report: str | None) -> list[tuple[str, str]]:
        from rich.markup import escape

        rows = [("steps", f"{outcome.step} in {self.elapsed:.0f} s")]
        if self.first_loss is not None and self.last_loss is not None:
            rows.append(("training loss", f"{self.first_loss:.4f} → {self.last_loss:.4f}"))
        if outcome.validation_loss is not None:
            rows.append(("validation loss", f"{outcome.validation_loss:.4f}"))
        rows.append(("throughput", f"{self.speed:,.0f} tokens/s (median)"))
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in self.shares.items())
        rows.append(("time", shares))
        rows.append(("wire", self._wire))
        style = "green" if outcome.proof.equal else "bold red"
        rows.append(("replicas", f"[{style}]{outcome.proof}[/{style}]"))
        if report is not None:
            rows.append(("report", escape(report)))
        return rows


class _Bar:
    """A rich progress bar."""

    def __init__(self, console: Any, trainer: Trainer) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/bold]"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("[dim]{task.fields[lost]}[/dim]"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._progress.start()
        self._task = self._progress.add_task(
            "", total=trainer.total_steps, completed=trainer.step, loss="…", speed="", lost=""
        )

    def update(self, step: int, total: int, words: dict[str, str]) -> None:
        fields: dict[str, Any] = {**words}
        self._progress.update(self._task, completed=step, **fields)

    def line(self, text: str) -> None:
        self._progress.console.print(f"[dim]{text}[/dim]", highlight=False)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    """For log files: a line every few seconds."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._shown = float("-inf")

    def update(self, step: int, total: int, words: dict[str, str]) -> None:
        now = time.monotonic()
        if now - self._shown >= SECONDS_BETWEEN_LINES or step == total:
            self._shown = now
            self.line(f"step {step}/{total}  loss {words['loss']}  {words['speed']}  {words['lost']}")

    def line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass
