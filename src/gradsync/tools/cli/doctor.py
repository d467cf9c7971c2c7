"""``gradsync doctor``: the findings as a table, or as JSON, and a block for bug reports."""

import json
import os
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsync.tools.cli.launching import MPS_HELP, ONE_GPU_HELP, GpuChoice
from gradsync.tools.doctor import Finding, Status, examine
from gradsync.tools.doctor.checks import place_of, versions

__all__ = ["doctor"]

STYLES = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
NAME_WIDTH = 13
MOST_COLUMNS = 120


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Seconds to measure each link; use more on a busy machine.")
    ] = 8.0,
    one_gpu: Annotated[bool, typer.Option("--one-gpu", help=ONE_GPU_HELP)] = False,
    mps: Annotated[bool, typer.Option("--mps", help=MPS_HELP)] = False,
) -> None:
    """Check whether this machine is ready for data-parallel training."""
    gpus = GpuChoice(one_gpu=one_gpu, mps=mps)
    sharing = gpus.sharing(gpus.default_ranks)
    # Of several ranks on a machine one is enough.
    if place_of(os.environ).local_rank > 0:
        return
    console = Console(highlight=False)
    if as_json:
        findings = examine(timeout=timeout, sharing=sharing)
        told = [{key: getattr(each, key) for key in ("name", "status", "detail", "fix")} for each in findings]
        print(json.dumps({"fit": _fit(findings), "versions": versions(), "findings": told}, indent=2))
    elif console.is_terminal:
        with console.status("examining this machine") as status:
            findings = examine(timeout=timeout, sharing=sharing, progress=lambda line: status.update(line))
        _show(console, findings)
    else:
        findings = examine(timeout=timeout, sharing=sharing)
        print("\n".join(_lines(findings)))
    if not _fit(findings):
        raise typer.Exit(1)


def _fit(findings: list[Finding]) -> bool:
    return all(finding.status is not Status.FAIL for finding in findings)


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, width=min(console.width, MOST_COLUMNS))
    table.add_column("", no_wrap=True)
    table.add_column("Check", no_wrap=True)
    table.add_column("Finding", overflow="fold", ratio=1)
    for finding in findings:
        style = STYLES[finding.status]
        text = Text(finding.detail)
        if finding.fix:
            text.append(f"\n→ {finding.fix}", style=style)
        table.add_row(Text(finding.status, style=style), finding.name, text)
    console.print(table)
    console.print()
    worst = max((finding.status for finding in findings), key=list(Status).index)
    console.print(Text(_sentence(findings), style=STYLES[worst]))
    console.print()
    # Not wrapped by rich: what is pasted has no line breaks of this terminal.
    print("\n".join(_report(findings)))


def _lines(findings: list[Finding]) -> list[str]:
    """The findings without a terminal: no colours, no wrapping, one line a finding where that is possible."""
    lines, indent = [], " " * (len(Status.PASS) + NAME_WIDTH + 4)
    for finding in findings:
        first, *others = finding.detail.splitlines()
        lines.append(f"{finding.status}  {finding.name:<{NAME_WIDTH}}  {first}")
        lines += [indent + line for line in (*others, *([f"→ {finding.fix}"] if finding.fix else []))]
    return [*lines, "", _sentence(findings), "", *_report(findings)]


def _sentence(findings: list[Finding]) -> str:
    failed = [finding.name for finding in findings if finding.status is Status.FAIL]
    warned = [finding.name for finding in findings if finding.status is Status.WARN]
    if failed:
        return f"Not fit for data-parallel training yet: see {', '.join(failed)}."
    if warned:
        return f"Fit for data-parallel training, with a remark on {', '.join(warned)}."
    return "Fit for data-parallel training."


def _report(findings: list[Finding]) -> list[str]:
    """The findings for a bug report: no host names, no addresses, no paths."""
    lines = [", ".join(f"{name} {version}" for name, version in versions().items())]
    for finding in findings:
        # The lines of a measurement in one, without the spaces that align them.
        detail = "; ".join(" ".join(line.split()) for line in finding.public_detail.splitlines())
        lines.append(f"{finding.status} {finding.name}: {detail}")
    return ["For a bug report (no host names, addresses or paths):", "```", *lines, "```"]
