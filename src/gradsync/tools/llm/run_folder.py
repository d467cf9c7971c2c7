"""The folder a training run leaves behind: its configuration, its metrics line by line, its summary.

=================  =================================================================================================
``config.json``    what was asked for; written once, also a resumed run leaves it as it is
``metrics.jsonl``  one JSON object a line, on disk before the next step begins
``summary.json``   what came of it; written at the end, so a folder without one belongs to a run that did not finish
=================  =================================================================================================

A run may be killed at any moment. So files that are written whole only get their name when they are complete, and the
metrics are cut back to whole lines when a run is resumed. A number that JSON cannot write (NaN, infinity) is written as
its name in quotes, and :func:`read_metrics` reads it back as a number.
"""

import errno
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.base.files import PARTIAL, whole_file

__all__ = ["SUMMARY", "Run", "RunFolder", "read_json", "read_metrics", "read_run", "write_whole"]

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
KINDS = ("step", "validation", "note")
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunFolder(AbstractContextManager["RunFolder"]):
    """Writes a run's folder; for rank 0 alone.

    A new run needs a folder that is new or empty. With ``resume`` the folder may hold an earlier part of the run; call
    :meth:`rewind` with the step of the checkpoint before anything is appended.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool) -> None:
        self.path = Path(path)
        self._last_step = 0
        with _clear_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_content(resume=resume)
            # Unbuffered: a line that was appended is with the operating system, whatever becomes of this process.
            self._metrics = (self.path / METRICS).open("ab", buffering=0)
            os.truncate(self.path / METRICS, sum(map(len, _whole_lines(self.path / METRICS))))

    def _check_content(self, *, resume: bool) -> None:
        # A run that failed before its first step leaves empty files and folders; they are nobody's work.
        names = sorted(entry.name for entry in self.path.iterdir() if _holds_something(entry))
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        if names and not resume:
            raise ConfigurationError(
                f"a new run needs a folder that is new or empty, but {self.path} holds {shown}. Choose another "
                "--run-folder, or go on with the run in this one by --resume"
            )
        if names and CONFIG not in names and METRICS not in names:
            raise ConfigurationError(
                f"expected a run to resume in {self.path}, with a {CONFIG} or a {METRICS}, but it holds {shown}. "
                "Give the --run-folder of the run, or start a new one elsewhere without --resume"
            )

    def rewind(self, step: int) -> int:
        """Drops what was recorded after ``step``, which a resumed run does again. Returns how many records went."""
        lines, records = _whole_lines(self.path / METRICS), read_metrics(self.path)
        kept = [line for line, record in zip(lines, records, strict=True) if record["step"] <= step]
        dropped = len(lines) - len(kept)
        self._last_step = step
        if dropped:
            write_whole(self.path / METRICS, b"".join(kept))
            with _clear_errors(self.path / METRICS):
                self._metrics.close()
                self._metrics = (self.path / METRICS).open("ab", buffering=0)
        # A summary says that the run is finished; one that goes on is not.
        with _clear_errors(self.path / SUMMARY):
            (self.path / SUMMARY).unlink(missing_ok=True)
        return dropped

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes ``config.json``. A resumed run keeps the first one, and notes what it does differently."""
        plain: dict[str, Any] = _plain(config)
        before = read_json(self.path / CONFIG)
        if before is None:
            write_whole(self.path / CONFIG, _as_json(plain, indent=2))
            return
        # That it is resumed is no difference worth a note.
        keys = [key for key in {**before, **plain} if before.get(key) != plain.get(key) and key != "resume"]
        if keys:
            changes = "; ".join(f"{key}: {before.get(key, 'unset')} → {plain.get(key, 'unset')}" for key in keys)
            self.note(self._last_step, f"resumed with another configuration: {changes}")

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line. ``record`` has a ``kind`` (step, validation or note) and a ``step``."""
        assert record["kind"] in KINDS
        line = _as_json(record).encode()
        self._last_step = record["step"]
        with _clear_errors(self.path / METRICS):
            self._write_line(line)

    def note(self, step: int, text: str) -> None:
        """Adds a remark for readers of the run: resumed, a step skipped, a fallback taken."""
        self.append({"kind": "note", "step": step, "text": text})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``: the run is finished."""
        write_whole(self.path / SUMMARY, _as_json(summary, indent=2))

    def close(self) -> None:
        """Ends the writing."""
        self._metrics.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What went wrong first is the better message.
        with nullcontext() if kind is None else suppress(GradsyncError):
            self.close()

    def _write_line(self, line: bytes) -> None:
        end = self._metrics.seek(0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:
                # A full disk may take the beginning of a line and refuse the rest.
                rest = rest[self._metrics.write(rest) :]
        except OSError:
            self._metrics.truncate(end)
            raise


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the folder holds, sorted by kind."""

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    finished: bool
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    notes: list[dict[str, Any]]

    @property
    def stride(self) -> int:
        """How many steps a record stands for, usually."""
        numbers = [int(record["step"]) for record in self.steps]
        gaps = [after - before for before, after in itertools.pairwise(numbers)]
        return int(statistics.median(gaps)) if gaps else 1

    @property
    def count(self) -> int:
        """How many steps all records stand for."""
        first, last = int(self.steps[0]["step"]), int(self.steps[-1]["step"])
        return last - first + max(1, min(self.stride, first))

    def series(self, name: str) -> list[tuple[float, float]]:
        """The step and the value of ``name`` of every record that has one."""
        return [(record["step"], float(record[name])) for record in self.steps if record.get(name) is not None]


def read_run(folder: Path) -> Run:
    """Everything a folder holds, of a run still under way too."""
    config, summary = read_json(folder / CONFIG), read_json(folder / SUMMARY)
    if config is None and not (folder / METRICS).exists():
        raise ConfigurationError(
            f"expected a run's folder with a {CONFIG} and a {METRICS}, but {folder} has neither. Give the folder that "
            f"gradsync train wrote to."
        )
    records = read_metrics(folder) if (folder / METRICS).exists() else []
    in_order = sorted(records, key=lambda record: int(record["step"]))
    return Run(
        name=folder.resolve().name,
        config=config or {},
        summary=summary or {},
        finished=summary is not None,
        steps=[record for record in in_order if record["kind"] == "step"],
        validations=[record for record in in_order if record["kind"] == "validation"],
        notes=[record for record in records if record["kind"] == "note"],
    )


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a run's folder (or of its ``metrics.jsonl``), of a run still under way too."""
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    with _clear_errors(path):
        lines = _whole_lines(path)
    return [_parse(line, number, path) for number, line in enumerate(lines, start=1)]


def read_json(path: Path) -> dict[str, Any] | None:
    """What :func:`write_whole` wrote; None where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise GradsyncError(f"expected JSON in {path}, but {error}. Mend or delete the file.") from error
    if not isinstance(content, dict):
        raise GradsyncError(f"expected a JSON object in {path}, got {type(content).__name__}. Mend or delete the file.")
    read: dict[str, Any] = _numbers(content)
    return read


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is either complete or not there."""
    with _clear_errors(path), whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _holds_something(entry: Path) -> bool:
    if entry.is_dir():
        return any(entry.iterdir())
    return not entry.name.endswith(PARTIAL) and entry.lstat().st_size > 0


def _whole_lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True)
    # What does not end in a newline was being written when the process ended, or is being written now.
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _parse(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if record["kind"] in KINDS and isinstance(record["step"], int):
            read: dict[str, Any] = _numbers(record)
            return read
    except (ValueError, KeyError, TypeError):
        pass
    raise GradsyncError(
        f"expected a record with a kind and a step in line {number} of {path}, got {line[:60]!r}. "
        f"Delete that line; the others are independent of it."
    )


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """What JSON can write: names for numbers it has no digits for, text for paths, dtypes and devices."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: entry if key == "text" else _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    """Turns what the operating system says about a file into one sentence with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "Choose a folder this user can write to."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "Free some space, or move the folder to a larger disk, then resume: what was recorded so far is "
            remedy += "whole."
        elif isinstance(error, FileExistsError | NotADirectoryError):
            remedy = "Give a folder; there is a file of that name."
        elif isinstance(error, FileNotFoundError):
            remedy = "Check the path; if the folder was removed while the run was under way, begin it again."
        raise GradsyncError(f"cannot use {path} for the run's records: {error.strerror or error}. {remedy}") from error
