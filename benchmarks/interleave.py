"""Variants of a step in turns, timed as `gradsync bench` times them, with a table of the results for the terminal."""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from gradsync.tools.bench.measure import CellRounds, Step
from gradsync.tools.bench.record import Cell, CellRecord, RowFile, read_records

__all__ = ["Step", "interleave", "on_gpu", "parser_of", "ratio", "table"]


def parser_of(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options of a script, which its documentation describes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def interleave(variants: Mapping[str, Step], *, warmup: int, rounds: int) -> CellRecord:
    """The samples of all rounds, on rank 0."""
    cell = Cell(name="", warmup=warmup, rounds=rounds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "raw.jsonl"
        with RowFile(path) as rows:
            rows.cell(cell)
            CellRounds(cell, rows).run(variants)
        return read_records(path)[0]


def on_gpu(step: Callable[[], None]) -> Step:
    """A step that has ended when the GPU is through with it."""

    def ended() -> None:
        step()
        torch.cuda.synchronize()

    return ended


def ratio(record: CellRecord, variant: str, baseline: str, digits: int = 3) -> str:
    """Of the times, with the 95 % interval."""
    found = record.ratio(variant, baseline)
    return f"{found.median:.{digits}f} ({found.low:.{digits}f}–{found.high:.{digits}f})"


def table(record: CellRecord, baselines: Sequence[str]) -> str:
    """The results as text, with one column of ratios per baseline."""
    columns = "".join(f"{'/ ' + name + ' (95 %)':>28}" for name in baselines)
    lines = [f"{'variant':<24}{'median ms':>11}{'p5':>9}{'p95':>9}{columns}"]
    for name in record.samples:
        seen = record.summary(name)
        row = f"{name:<24}{seen.median * 1e3:>11.2f}{seen.p5 * 1e3:>9.2f}{seen.p95 * 1e3:>9.2f}"
        lines.append(row + "".join(f"{ratio(record, name, baseline):>28}" for baseline in baselines))
    return "\n".join(lines)
