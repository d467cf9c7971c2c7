"""``gradsync bench``: what synchronization costs here, as pictures, tables and a page."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.tools.cli.failure_message import INTERRUPTED, refusing

if TYPE_CHECKING:
    from gradsync.tools.bench.report import BenchScreen
    from gradsync.tools.bench.runner import RunPlan

__all__ = ["bench"]

ALL, REPORT, FAULTS = "all", "report", "faults"


def bench(
    scenario: Annotated[
        str | None,
        typer.Argument(metavar="SCENARIO", help="A scenario; 'all'; or 'report' to redraw a folder of results."),
    ] = None,
    folder: Annotated[Path | None, typer.Argument(help="For 'report': the folder of results.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: NCCL ranks, one per GPU if there are enough, else all on one GPU.")
    ] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cells and rounds: minutes instead of hours.")] = False,
    out: Annotated[Path | None, typer.Option(help="New folder for the results. Default: bench-results/TIME.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue in this folder, and measure only what is missing.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", "--seeds", help="Measured rounds per cell; for 'faults', seeds per case.")
    ] = None,
    cases: Annotated[str | None, typer.Option(help="Run only these cells (names, comma-separated).")] = None,
    peers: Annotated[str | None, typer.Option(help="For 'faults': test only these peers (comma-separated).")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Start no cell, and no trial of 'faults', after this many minutes.")
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(help="For 'faults': number of trials at once, with three ranks each. Allow two cores per trial."),
    ] = 1,
    report: Annotated[
        bool, typer.Option(help="Draw pictures and a page at the end. 'bench report' can do it later, on any machine.")
    ] = True,
    listing: Annotated[bool, typer.Option("--list", help="List scenarios and exit.")] = False,
) -> None:
    """Measure what synchronization costs, compared with torch's DDP, Accelerate and others.

    Results go to a folder: raw samples, tables, pictures, and report.html with everything on one page. Scenarios that
    emulate hosts need root; without it they are skipped, and the report says so. With --device cuda, ranks communicate
    through NCCL: one per GPU, or several on one GPU, under MPS if possible.
    """
    # Pictures and pages are not needed by the other commands, so their packages are imported here.
    try:
        from gradsync.tools.bench.record import ResultFolder
        from gradsync.tools.bench.report import REPORT as PAGE
        from gradsync.tools.bench.report import BenchScreen, build_report
        from gradsync.tools.bench.runner import Placement, RunPlan
        from gradsync.tools.bench.scenarios import SCENARIOS, find_scenarios
    except ModuleNotFoundError as error:
        raise GradsyncError(f"{error.name} is missing: pip install 'gradsync[bench]'") from error

    screen = BenchScreen()
    if listing or scenario is None:
        if scenario is not None:
            raise ConfigurationError("--list stands alone: it lists all scenarios")
        for each in SCENARIOS:
            print(f"{each.name:<14} {each.question}")
    elif scenario == REPORT:
        if folder is None:
            raise ConfigurationError("expected the folder of results after 'report', got nothing")
        results = ResultFolder.open(folder)
        screen.results(build_report(results, SCENARIOS))
        print(f"\nreport: {results.path / PAGE}")
    else:
        if folder is not None:
            raise ConfigurationError(f"expected one scenario, or 'all', but {folder} follows. For a folder say --out")
        if resume is not None and out is not None:
            raise ConfigurationError("expected --out for a new folder, or --resume for one with results, got both")
        if resume is not None:
            with refusing("--resume"):
                ResultFolder.open(resume)
        asked, placement = find_scenarios(scenario), Placement.on(device)
        for option, is_given in ((f"--peers {peers}", peers is not None), (f"--jobs {jobs}", jobs != 1)):
            # Else somebody waits for hours for what was not asked for.
            if is_given and not any(each.name == FAULTS for each in asked):
                raise ConfigurationError(f"{option} is for the scenario {FAULTS!r}, got {scenario!r}: leave it out")
        plan = RunPlan(
            scenarios=placement.scenarios(asked, all_of_them=scenario == ALL),
            placement=placement,
            reports=report,
            out=resume or out or Path("bench-results") / time.strftime("%Y%m%d-%H%M%S"),
            resumes=resume is not None,
            quick=quick,
            rounds=rounds,
            cases=_listed(cases),
            peers=_listed(peers),
            minutes=minutes,
            jobs=jobs,
            command=shlex.join(["gradsync", *sys.argv[1:]]),
        )
        _run(plan, screen)


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _run(plan: "RunPlan", screen: "BenchScreen") -> None:
    from gradsync.tools.bench.report import REPORT as PAGE
    from gradsync.tools.bench.runner import run

    outcome = run(plan, screen)
    screen.results(outcome.sections)
    path = outcome.folder.path
    print(
        f"\nreport: {path / PAGE}" if plan.reports else f"\nresults: {path} (gradsync bench report {path} shows them)"
    )
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)
    if outcome.failed:
        raise GradsyncError(f"failed: {', '.join(outcome.failed)}. The results of the others are complete")
