"""``gradsync plan``: step times on many ranks, what would be faster, and how fast a link must be."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.numbers import count, duration, saving
from gradsync.observe.plan.calibration import Calibration, recorded
from gradsync.observe.plan.library import known_machines, known_models, published
from gradsync.observe.plan.network import Overlap
from gradsync.observe.plan.planner import Setting
from gradsync.observe.plan.report import PlanReport, make_report, rate_words
from gradsync.tools.cli.failure_message import refusing
from gradsync.tools.lab.lab import Rate

__all__ = ["plan"]

RANKS = "2,4,8,16,32,64,128,256,512,1024,4096,10000"
MODES: dict[str, Overlap] = {"plain": "backward", "next-forward": "next-forward", "no-overlap": "none"}
MOST_RANKS = 10_000_000
PICTURES = (".svg", ".png")


def plan(
    calibration: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A calibration written by --measure, or the folder of a recorded run."),
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Use a known machine instead of RUN (see --list).")] = None,
    model: Annotated[str | None, typer.Option(help="With --profile: a known model (see --list).")] = None,
    batch: Annotated[int | None, typer.Option(help="With --profile: samples per micro-batch.")] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks (comma-separated).")] = RANKS,
    link: Annotated[str | None, typer.Option(help="Rate of the links between hosts, such as 10gbit.")] = None,
    bucket_mb: Annotated[float | None, typer.Option(help="Bucket size in MiB. Default: the best size.")] = None,
    reduction: Annotated[str, typer.Option(help="mean, bf16, int8, …")] = "mean",
    mode: Annotated[str, typer.Option(help="plain, next-forward or no-overlap.")] = "plain",
    accumulate: Annotated[int | None, typer.Option(min=1, help="Micro-batches per step. Default: as recorded.")] = None,
    loss: Annotated[
        float, typer.Option(help="Largest acceptable loss of speed in percent, for the required link rate.")
    ] = 5.0,
    price: Annotated[
        float | None, typer.Option(help="Price of a rank per hour: the plan says what 1,000 steps cost.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan in this .svg or .png file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    measure: Annotated[
        Path | None,
        typer.Option(help="Measure a small GPT on two ranks of this machine, and write a calibration to this file."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="With --measure: use two hosts of a lab with links of this rate (needs root).")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List known machines and models, and exit.")] = False,
) -> None:
    """Predict the time of a step on 2 to 10,000 ranks, what would be faster, and how fast a link must be.

    The prediction is a simulation, based on a calibration with two ranks or on published figures of a machine and a
    model.
    """
    if listing:
        for title, known in (("machines (--profile)", known_machines()), ("models (--model)", known_models())):
            print("\n".join([title, *(f"  {name:<12} {words}" for name, words in known.items())]))
        return
    _check_files(picture, measure)
    with refusing("--hosts"):
        host_rate = None if hosts is None else Rate.parse(hosts)
    if host_rate is not None and measure is None:
        raise ConfigurationError(f"--hosts {hosts} says where --measure measures: give both")
    if measure is not None:
        _measure(measure, host_rate)
        return
    chosen = _calibration(calibration, profile, model, batch)
    setting = _setting(chosen, link, bucket_mb, reduction, mode, accumulate)
    if not 0 < loss < 100:
        raise ConfigurationError(f"--loss is a percentage above 0 and below 100, got {loss:g}")
    if price is not None and not 0 <= price < math.inf:
        raise ConfigurationError(f"--price is what a rank costs an hour, 0 or more, got {price:g}")
    report = make_report(chosen, _ranks(ranks), setting, choose_size=bucket_mb is None, loss=loss / 100)
    if as_json:
        print(json.dumps(_as_data(report, price), indent=1))
    else:
        _show(report, price)
    if picture is not None:
        from gradsync.observe.plan.report import save_picture

        save_picture(report, picture)
        print(f"\npicture: {picture}")


def _check_files(picture: Path | None, measure: Path | None) -> None:
    """Refuse files that could not be written before the work, which would be lost."""
    for option, path in (("--picture", picture), ("--measure", measure)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigurationError(f"{option} {path} would lie in a folder that does not exist")
    if picture is not None and picture.suffix not in PICTURES:
        raise ConfigurationError(f"--picture {picture}: a picture is drawn into a {' or a '.join(PICTURES)}")


def _setting(
    calibration: Calibration, link: str | None, bucket_mb: float | None, reduction: str, mode: str, micro: int | None
) -> Setting:
    if mode not in MODES:
        raise ConfigurationError(f"--mode is one of {', '.join(MODES)}, got {mode!r}")
    with refusing("--bucket-mb"):
        Setting(ranks=1, bucket_mb=bucket_mb)
    with refusing("--reduction"):
        calibration.schedule(reduction=reduction)
    with refusing("--link"):
        rate = None if link is None else Rate.parse(link).bytes_per_second
    if reduction != "mean" and MODES[mode] == "next-forward":
        raise ConfigurationError(
            f"--mode {mode} and --reduction {reduction} exclude each other: next-forward is what a sharded optimizer "
            "does, and that sends exact means"
        )
    return Setting(
        ranks=1,
        bucket_mb=bucket_mb,
        overlap=MODES[mode],
        reduction=reduction,
        micro_batches=micro or calibration.profile.micro_batches,
        rate=rate,
    )


def _ranks(text: str) -> list[int]:
    try:
        numbers = sorted({int(each) for each in text.replace("_", "").split(",")})
    except ValueError:
        raise ConfigurationError(f"--ranks are whole numbers with commas between them, got {text!r}") from None
    if not numbers or numbers[0] < 1 or numbers[-1] > MOST_RANKS:
        raise ConfigurationError(f"--ranks lie between 1 and {MOST_RANKS:,}, got {text!r}")
    return numbers


def _calibration(path: Path | None, profile: str | None, model: str | None, batch: int | None) -> Calibration:
    machines, models = known_machines(), known_models()
    for option, value, known in (("--profile", profile, machines), ("--model", model, models)):
        if value is not None and value not in known:
            raise ConfigurationError(f"{option} is one of {', '.join(known)}, got {value!r}")
    given = {"--profile": profile, "--model": model, "--batch": batch}
    words = [f"{option} {value}" for option, value in given.items() if value is not None]
    if path is not None:
        if words:
            raise ConfigurationError(f"give a calibration or a run ({path}), or {' and '.join(words)}, not both")
        return recorded(path) if path.is_dir() else Calibration.load(path)
    if profile is None or model is None:
        if words:
            option, known = ("--profile", machines) if profile is None else ("--model", models)
            verb = "needs" if len(words) == 1 else "need"
            raise ConfigurationError(f"{' and '.join(words)} {verb} {option}, one of {', '.join(known)}")
        raise ConfigurationError(
            "expected a calibration (gradsync plan --measure FILE makes one), or --profile and --model; "
            "gradsync plan --list names those that are known"
        )
    with refusing("--batch"):
        return published(profile, model, batch=batch)


def _measure(path: Path, rate: Rate | None) -> None:
    from gradsync.tools.bench.workload import RealWorkload
    from gradsync.tools.calibration import CalibrationPlan, run_calibration

    # Small enough for a laptop, large enough that buckets matter.
    workload = RealWorkload(layers=6, width=256, batch=2, length=128)
    made = run_calibration(CalibrationPlan(workload=workload, rate=rate))
    made.save(path)
    step, link = duration(made.profile.compute), made.transport.cost("all_reduce", 1 << 20).seconds
    print(
        f"{path}: a step of {step} with {made.profile.nbytes / 1e6:.1f} MB of gradients, and an all-reduce of 1 MiB in "
        f"{duration(link)}, over {made.facts['transport']}"
    )
    for words in made.warnings:
        print(f"Warning: {words}.")


def _show(report: PlanReport, price: float | None) -> None:
    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    names = ("ranks", "step", "90 % within", "exposed", "efficiency", "buckets")
    for name in names if price is None else (*names, "1,000 steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in report.predictions:
        parts, size = each.simulated.slowest, each.setting.bucket_mb
        row = [
            f"{each.setting.ranks:,}",
            duration(each.step),
            f"{duration(each.low)} – {duration(each.high)}",
            f"{parts.exposed / each.step:.0%}",
            f"{report.efficiency(each):.0%}",
            "one" if size is None else f"{size:g} MB",
        ]
        table.add_row(*row, *([] if price is None else [f"{report.cost(each, price):,.2f}"]))
    console.print(table)
    print("\n" + "\n".join(_sentences(report)))


def _sentences(report: PlanReport) -> list[str]:
    last = report.predictions[-1]
    lines = [f"Warning: {words}." for words in report.calibration.warnings]
    lines += [f"One rank alone: {duration(report.alone)} a step, {report.calibration.profile.nbytes / 1e6:.1f} MB."]
    lines += [f"  {name}: {words}" for name, words in report.calibration.facts.items()]
    if last.extrapolates:
        lines.append(f"The last line extrapolates: {last.extrapolates}.")
    if not report.calibration.measured:
        lines.append("Nothing here was measured: numbers are those of datasheets and papers.")
    at = f"at {count(last.setting.ranks, 'rank')}"
    if report.needed is None:
        lines.append(f"No link is fast enough to lose less than {report.loss:.0%} {at}: latencies alone take more.")
    elif not report.needed:
        lines.append(f"Any link between hosts is fast enough to lose less than {report.loss:.0%} {at}.")
    else:
        lines.append(f"To lose less than {report.loss:.0%} {at}, the link of a host needs {rate_words(report.needed)}.")
    for advice in report.advice:
        lines.append(f"Saves {saving(advice.saved, advice.gain)} {at}: {advice.words}\n    → {advice.line}")
    if not report.advice:
        lines.append(f"Nothing that was tried gains a hundredth {at}.")
    return lines


def _as_data(report: PlanReport, price: float | None) -> dict[str, object]:
    return {
        "alone": report.alone,
        "measured": report.calibration.measured,
        "facts": dict(report.calibration.facts),
        "warnings": list(report.calibration.warnings),
        "predictions": [
            {
                **asdict(each.setting),
                "step": each.step,
                "low": each.low,
                "high": each.high,
                "efficiency": report.efficiency(each),
                "parts": asdict(each.simulated.slowest),
                "extrapolates": each.extrapolates,
                **({} if price is None else {"cost of 1,000 steps": report.cost(each, price)}),
            }
            for each in report.predictions
        ],
        "link for the loss": {"loss": report.loss, "bytes a second": report.needed},
        "advice": [
            {"gain": each.gain, "seconds a step": each.saved, "change": each.words, "line": each.line}
            for each in report.advice
        ],
    }
