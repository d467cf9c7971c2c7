"""The report of a run: its charts in numbers, its page as text, and what a browser makes of it."""

import io
import itertools
import math
import random
import re
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gradsync.errors import ConfigurationError
from gradsync.observe.charts.canvas import PALETTE, PARTS, canvas, colour, style
from gradsync.observe.charts.kinds import Point, Series, draw_columns, draw_lanes, draw_steps, thin
from gradsync.observe.charts.numbers import compact, duration, size, tick_labels
from gradsync.observe.charts.page import page_svg, svg_file
from gradsync.observe.explain.explanation import NAMES
from gradsync.observe.explain.split import PARTS as STEP_PARTS
from gradsync.observe.plan.library import published
from gradsync.observe.plan.planner import Setting
from gradsync.observe.plan.report import draw_plan, make_report
from gradsync.observe.recording.files import lines_of, write_lines
from gradsync.tools.llm.recording import RunRecorder
from gradsync.tools.llm.report import write_report
from gradsync.tools.llm.run_folder import RunFolder, read_run
from gradsync.tools.llm.step_records import PHASES
from gradsync.tools.llm.time_shares import explain_run, lanes_of, names_of, time_shares
from tests.browser import browse, needs_chromium
from tests.recordings import Loop, World

pytest.importorskip("jinja2", reason="the report needs the extra gradsync[train]")
pytest.importorskip("matplotlib", reason="the report needs the extra gradsync[train]")

CHARTS = ("loss", "throughput", "norm", "rate", "time")
VOID = {"meta", "link", "br", "img", "hr", "input"}


# -- a plausible run ---------------------------------------------------------------------------------------------------


def step_record(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    warmup = max(1, steps // 20)
    rate = 3e-4 * min(step / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
    seconds = {
        "data": 0.004 * chance.uniform(0.8, 1.6),
        "forward": 0.052 * chance.uniform(0.95, 1.05),
        "backward": 0.101 * chance.uniform(0.95, 1.05),
        "synchronization": 0.009 * chance.uniform(0.5, 2) * (5 if step % 97 == 0 else 1),
        "update": 0.011 * chance.uniform(0.9, 1.1),
    }
    return {
        "kind": "step",
        "step": step,
        "time": step * 0.182,
        "loss": 2.1 + 8.1 * (1 + 30 * step / steps) ** -0.55 + chance.gauss(0, 0.06),
        "tokens": 16384,
        "tokens_per_second": 16384 / sum(seconds.values()),
        "gradient_norm": 0.6 + 3 * math.exp(-20 * step / steps) + chance.expovariate(6),
        "learning_rate": rate,
        "seconds": seconds,
    }


CONFIG = {
    "model": "gpt2-124m",
    "data": "stdlib",
    "ranks": 4,
    "grad_accum": 4,
    "parameters": 124_439_808,
    "micro_batch": 8,
    "sequence_length": 128,
    "learning_rate": 3e-4,
    "tokenizer": None,
    "metrics": None,
    "torch": "2.13.0",
    "python": "3.11.2",
    "device": "cuda:0",
    "machine": {"cpu": "x86_64", "gpus": "4 × NVIDIA H200"},
}
SUMMARY = {
    "step": 600,
    "signal": 0,
    "validation_loss": 3.4,
    "peak_memory_bytes": 13_421_772_800,
    "digest": "9f2c4b" + "0a" * 29,
    "replicas_equal": True,
}


def make_run(path: Path, *, steps: int = 600, validations: bool = True, **summary: Any) -> Path:
    """A finished run as ``gradsync train`` leaves it."""
    chance = random.Random(0)
    with RunFolder(path, resume=False) as folder:
        folder.write_config(CONFIG)
        for step in range(1, steps + 1):
            record = step_record(step, steps, chance)
            folder.append(record)
            if validations and step % max(1, steps // 12) == 0:
                folder.append({"kind": "validation", "step": step, "loss": record["loss"] + 0.1})
        folder.note(steps, "resumed from runs/demo/checkpoints/step-300")
        folder.write_summary({**SUMMARY, **summary})
    return path


# -- the numbers of charts ---------------------------------------------------------------------------------------------


def drawn(*lines: list[Point], width: float = 6.0) -> Any:
    """The axes of a chart of lines."""
    with style(size=12):
        _, (axes,) = canvas(width=width, height=3)
        draw_steps(axes, [Series(label="", points=points, colour=colour("blue")) for points in lines])
    return axes


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.87, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 3e-4, [0, 1e-4, 2e-4, 3e-4]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (98_000, 143_000, [90_000, 100_000, 110_000, 120_000, 130_000, 140_000, 150_000]),
    ],
)
def test_ticks_are_round_and_frame_the_values(low: float, high: float, expected: list[float]) -> None:
    axes = drawn([(1, low), (2, high)])
    assert list(axes.get_yticks()) == pytest.approx(expected)
    assert axes.get_ylim() == pytest.approx((expected[0], expected[-1]))


def test_ticks_of_steps_are_whole() -> None:
    assert [tick for tick in drawn([(1, 0.0), (3, 1.0)]).get_xticks() if 1 <= tick <= 3] == [1, 2, 3]
    assert [tick for tick in drawn([(1, 0.0)]).get_xticks() if 0.5 <= tick <= 1.5] == [1]
    assert len(drawn([(1, math.nan)]).get_yticks()) > 1


@pytest.mark.breadth
@pytest.mark.parametrize("power", range(-8, 9))
@pytest.mark.parametrize("low", [0.0, 0.37, -2.9])
def test_ticks_are_few_and_have_labels_of_their_own(power: int, low: float) -> None:
    scale = 10.0**power
    found = [float(tick) for tick in drawn([(1, low * scale), (2, 7.3 * scale)]).get_yticks()]
    assert 2 <= len(found) <= 8
    assert found[0] <= low * scale * (1 + 1e-9)
    assert found[-1] >= 7.3 * scale * (1 - 1e-9)
    assert len(set(tick_labels(found))) == len(found)


def test_thinning_keeps_what_stands_out() -> None:
    points = [(float(x), math.sin(x / 500)) for x in range(10_000)]
    points[4321], points[8000] = (4321.0, 50.0), (8000.0, math.nan)
    thinned = thin(points)
    assert 400 <= len(thinned) <= 800
    assert (4321.0, 50.0) in thinned
    assert min(y for _, y in thinned) == min(y for _, y in points)
    assert any(math.isnan(y) for _, y in thinned)
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)


def test_thinning_leaves_few_points_alone() -> None:
    assert thin([]) == []
    assert thin([(1, 2.0), (2, math.nan)])[0] == (1, 2.0)
    assert len(thin([(float(x), math.nan) for x in range(5000)])) <= 800


def test_one_wild_value_does_not_flatten_the_rest() -> None:
    axes = drawn([*((float(x), 2 + x / 100) for x in range(100)), (101.0, 1e6)])
    assert axes.get_ylim() == (2.0, 3.0)
    (beyond,) = [line for line in axes.lines if line.get_marker() == "^"]
    assert list(beyond.get_xdata()) == [101.0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (0.00031, "3.1e−4"), (1.25, "1.25"), (850, "850"), (12_345, "12.35k"), (3.4e6, "3.4M"), (-2.5, "−2.5")],
)
def test_numbers_are_short(value: float, expected: str) -> None:
    assert compact(value) == expected
    assert compact(math.nan) == "not finite"


def test_units() -> None:
    assert [duration(s) for s in (0.0, 0.99949, 0.9999, 0.0009999)] == ["0 s", "999 ms", "1 s", "1 ms"]
    assert [duration(s) for s in (4e-5, 0.0123, 7.0, 119.9, 7384)] == [
        "40 µs",
        "12.3 ms",
        "7 s",
        "1 min 59 s",
        "2 h 03 min",
    ]
    assert [size(n) for n in (12, 2048, 26_214_400, 13_421_772_800)] == ["12 B", "2 KiB", "25 MiB", "12.5 GiB"]


def test_labels_of_an_axis_do_not_touch() -> None:
    """The step is far from the origin, where labels are long."""
    axes = drawn([(float(x), 1.0) for x in range(1_000_000, 1_002_000, 50)], width=448 / 72)
    with style(size=12):
        axes.figure.draw_without_rendering()
    inside = [text for text, tick in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True) if tick <= 1_001_950]
    boxes = [text.get_window_extent() for text in inside]
    assert len(boxes) >= 2
    for box, following in itertools.pairwise(boxes):
        assert following.x0 - box.x1 > 10
    assert boxes[-1].x1 < 448 + 4


def rgba(shade: str) -> tuple[float, ...]:
    from matplotlib.colors import to_rgba

    return to_rgba(shade)


def test_the_same_numbers_give_the_same_text() -> None:
    def draw() -> str:
        with style():
            figure, (axes,) = canvas("A title & more $")
            draw_steps(axes, [Series(label="x", points=[(1, 2.0), (2, 3.0)], colour=colour("blue"))])
            return svg_file(figure, "slug")

    svg = draw()
    assert svg == draw()
    assert "date" not in svg
    light, dark = PALETTE["blue"]
    assert f'[style*="stroke: {light}"] {{ stroke: {dark} !important }}' in svg, "a file of its own bears dark paper"
    part = page_svg(svg, slug="slug", title="<&>")
    assert "A title &amp; more $" in part, "letters are letters"
    assert "var(--blue)" in part
    assert not re.search("#[0-9a-f]{6}", part), "every colour has a name"
    lights = [light for light, _ in PALETTE.values()]
    assert len(set(lights)) == len(lights)


# -- the page ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order, and nothing leads outside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.images: list[str] = []
        self.references: set[str] = set()
        self.scripts = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        if "id" in found:
            self.ids.append(str(found["id"]))
        if tag == "svg":
            assert found["role"] == "img"
            self.images.append(str(found["aria-labelledby"]))
        # One mark is drawn in many places, and cut at its frame: what is meant stands on the same page.
        reference = str(found.pop("href", "")) if tag == "use" else ""
        reference += str(found.pop("clip-path", "")).removeprefix("url(").removesuffix(")")
        if reference:
            assert reference.startswith("#"), reference
            self.references.add(reference[1:])
        for name, value in found.items():
            assert name not in ("src", "href", "action", "srcset", "xlink:href"), f"{tag} {name}={value}"
            assert not name.startswith("on"), f"{tag} {name}={value}"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(path: Path) -> Page:
    text = write_report(path).read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\((?!#)|@import|//[a-z]+\.", text)
    assert not re.search(r' (?:d|x|y|cx|cy|width|height)="[^"]*(?:nan|inf)', text)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids)), "an id is used twice"
    assert all(image in page.ids for image in page.images)
    assert page.references <= set(page.ids)
    return page


def test_the_reader_of_pages_can_say_no() -> None:
    for text in ("<p><b></p></b>", "<p>", "</p>", '<img src="x.png">', '<a href="http://x">x</a>', '<p onclick="x">'):
        with pytest.raises(AssertionError):
            Page(text)


def test_the_page_of_a_run(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "demo"))
    assert set(CHARTS) <= set(page.ids)
    # Loss, throughput and the columns for two widths; norm and rate for one.
    assert len(page.images) == 8
    for words in (
        "gpt2-124m on stdlib",
        "4 ranks × 4 micro-batches a step · 124.4M parameters · run demo",
        "all replicas hold the same parameters, digest 9f2c4b0a0a0a",
        "12.5 GiB",
        "600 steps",
        "The training loss went from 9.899 to 3.247",
        "Each column stands for 5 steps.",
        "resumed from runs/demo/checkpoints/step-300",
        "machine.gpus 4 × NVIDIA H200",
        "tokenizer – ",
    ):
        assert words in page.text, words
    assert "Not recorded" not in page.text


def test_the_shares_are_those_of_the_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path, resume=False) as folder:
        for step in (1, 2):
            seconds = {"data": 0.01, "forward": 0.03, "backward": 0.04, "synchronization": 0.015, "update": 0.005}
            folder.append({"kind": "step", "step": step, "seconds": seconds})
    page = page_of(tmp_path)
    assert "lost to synchronization 15.0%" in page.text
    assert "A step takes 100 ms on average. The largest part of it is backward, 40.0%." in page.text
    assert "synchronization 15.0% · 15 ms" in page.text


def record_ranks(folder: Path, *ranks: Loop, **shape: Any) -> None:
    """What ranks that do this in a step write beside the run."""
    target = folder / "recording"
    target.mkdir(parents=True)
    for recording in World(ranks=ranks, **shape).record():
        write_lines(target / f"rank-{recording.header.rank:05d}.jsonl", lines_of(recording))


@pytest.mark.breadth
def test_a_recording_tells_waiting_for_a_rank_from_waiting_for_the_wire(tmp_path: Path) -> None:
    make_run(tmp_path, steps=20)
    record_ranks(tmp_path, Loop(), Loop(forward=0.04))
    page = page_of(tmp_path)
    assert {"time", "ranks"} <= set(page.ids)
    # One rank waits 30 ms, the other none; a step takes 64.7 ms.
    assert "waiting 25.1% of a step: for other ranks 23.2%, for the wire 1.9%" in page.text
    assert "waiting for a rank 23.2% · 15 ms" in page.text
    assert "lost to synchronization" not in page.text
    assert "2 ranks on one clock; rank 1 was the last to come" in page.text
    assert "rank 0 waits for rank 1: 30 ms" in page.text
    assert "What to change, and what it would save for the samples of a step" in page.text
    assert "rank 1 is 300% slower in forward (40 ms against 10 ms)" in page.text


def percentages(text: str) -> dict[str, str]:
    """By their names, as the legend of the bar has them."""
    parts = {NAMES.get(name, name) for name in (*STEP_PARTS, *PHASES)}
    return {name: found[1] for name in parts if (found := re.search(rf"\b{name} ([\d.]+%) · ", text))}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.breadth) for seed in (1, 2))])
def test_the_bar_its_legend_and_the_text_have_the_same_numbers(tmp_path: Path, seed: int, recorded: bool) -> None:
    chance = random.Random(seed)
    make_run(tmp_path, steps=20)
    if recorded:
        loops = (Loop(**{name: chance.uniform(0.001, 0.05) for name in vars(Loop())}) for _ in range(3))
        record_ranks(tmp_path, *loops)
    page = page_of(tmp_path)
    text, html = page.text, (tmp_path / "report.html").read_text(encoding="utf-8")
    legend = percentages(text)
    assert set(legend) == {NAMES.get(name, name) for name in (STEP_PARTS if recorded else PHASES)}
    bar = re.search(r'<div class="shares">(.*?)</div>', html, re.DOTALL)
    assert bar is not None
    spans = re.findall(r'flex-grow: ([\d.e-]+);[^>]*title="([^:]+): ([\d.]+%)">([^<]*)</span>', bar[1])
    assert {name: share for _, name, share, _ in spans} == legend
    assert all(label in ("", share) and f"{float(grow):.1%}" == share for grow, _, share, label in spans)
    assert sum(float(grow) for grow, *_ in spans) == pytest.approx(1.0)
    largest = re.search(r"The largest part of it is ([a-z ]+), ([\d.]+%)\.", text)
    assert largest is not None
    assert legend[largest[1]] == largest[2]
    if recorded:
        others = re.search(r"Waiting for other ranks takes ([\d.]+%), for the wire ([\d.]+%)\.", text)
        assert others is not None
        assert others[1] == legend["waiting for a rank"]
        assert f"for other ranks {others[1]}, for the wire {others[2]}" in text
        wire = float(legend["queued communication"][:-1]) + float(legend["exposed communication"][:-1])
        assert float(others[2][:-1]) == pytest.approx(wire, abs=0.11)
    else:
        assert f"Exposed synchronization takes {legend['synchronization']}." in text


@pytest.mark.breadth
def test_waiting_has_one_colour_in_every_picture(tmp_path: Path) -> None:
    """In the bar, the columns, the lanes and a plan; and nothing else has it."""
    make_run(tmp_path, steps=20)
    record_ranks(tmp_path, Loop(), Loop(forward=0.04))
    html = write_report(tmp_path).read_text(encoding="utf-8")
    waiting = rgba(PARTS["waiting"])
    assert re.search(r'background: var\(--orange\)" title="waiting for a rank', html)
    run, explanation = read_run(tmp_path), explain_run(tmp_path)
    assert explanation is not None
    shares = time_shares(run, explanation)
    assert shares is not None
    plan = make_report(published("t4-10gbe", "bert-base"), [4], Setting(ranks=1, bucket_mb=25.0), choose_size=False)
    with style():
        _, (columns, lanes) = canvas(panels=["", ""], shared=False)
        draw_columns(columns, shares.edges, shares.columns)
        draw_lanes(lanes, lanes_of(explanation), names_of())
        steps = draw_plan(plan).axes[0]
    named = [
        (label, tuple(handle.patches[0].get_facecolor()))
        for axes in (lanes, steps)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if hasattr(handle, "patches")
    ]
    assert {colour == waiting for label, colour in named if "wait" in label} == {True}
    assert [label for label, colour in named if colour == waiting and "wait" not in label] == []
    drawn = [tuple(each.get_facecolor()[0]) for each in columns.collections]
    assert drawn[list(shares.columns).index("waiting")] == waiting
    assert drawn.count(waiting) == 1


def test_a_resumed_run_names_the_steps_of_its_recording_as_the_run_does(tmp_path: Path) -> None:
    make_run(tmp_path, steps=60)
    record_ranks(tmp_path, Loop(), Loop(), steps=20)
    run, explanation = read_run(tmp_path), explain_run(tmp_path)
    assert explanation is not None
    shares = time_shares(run, explanation)
    assert shares is not None
    assert (shares.edges[0], shares.edges[-1]) == (40.5, 60.5)


@pytest.mark.breadth
def test_of_many_ranks_some_are_drawn(tmp_path: Path) -> None:
    make_run(tmp_path, steps=20)
    record_ranks(tmp_path, *(Loop() for _ in range(20)), steps=6)
    page = page_of(tmp_path)
    assert "20 ranks on one clock" in page.text
    assert "8 of them are shown" in page.text


def test_a_recording_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    make_run(tmp_path, steps=20)
    record_ranks(tmp_path, Loop(), Loop())
    (tmp_path / "recording" / "rank-00001.jsonl").unlink()
    assert "lost to synchronization" in page_of(tmp_path).text


def test_records_of_several_steps(tmp_path: Path) -> None:
    """On a GPU a record stands for the steps since the one before."""
    with RunFolder(tmp_path, resume=False) as folder:
        for step in range(10, 101, 10):
            folder.append({"kind": "step", "step": step, "seconds": {"forward": 0.6, "backward": 0.4}})
    page = page_of(tmp_path)
    assert "100 steps" in page.text
    assert "A step takes 100 ms on average." in page.text
    assert "Each column stands for 10 steps." in page.text


@pytest.mark.parametrize("steps", [0, 1, *(pytest.param(steps, marks=pytest.mark.breadth) for steps in (2, 31, 3000))])
def test_runs_of_any_length(tmp_path: Path, steps: int) -> None:
    page = page_of(make_run(tmp_path / "run", steps=steps))
    assert ("No step was recorded." in page.text) == (steps == 0)
    assert (set(CHARTS) <= set(page.ids)) == (steps > 0)
    assert (tmp_path / "run" / "report.html").stat().st_size < 600_000


def test_what_was_not_recorded_is_not_drawn(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", steps=20, validations=False))
    assert "validation loss" not in page.text
    assert "Not recorded in this run: validation." in page.text


def test_a_run_under_way_says_so(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=0)
    (path / "summary.json").unlink()
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "step", "st')
    assert "This run has written no summary" in page_of(path).text


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    with RunFolder(tmp_path, resume=False) as folder:
        for step in range(1, 101):
            loss = bad if 40 <= step < 45 else 10.0 / step
            folder.append({"kind": "step", "step": step, "loss": loss, "gradient_norm": bad})
        folder.append({"kind": "validation", "step": 100, "loss": bad})
    page = page_of(tmp_path)
    assert "The loss was not finite in 5 records, first at step 40" in page.text
    assert "validation loss not finite" in page.text
    assert "norm" not in page.ids
    text = (tmp_path / "report.html").read_text()
    smooth = re.search(r'd="([^"]*)" style="fill: none; stroke: var\(--blue\); stroke-width: 1.8', text)
    assert smooth is not None
    assert smooth[1].count("M") == 2, "the line has a gap"


def test_only_losses_that_are_not_finite(tmp_path: Path) -> None:
    with RunFolder(tmp_path, resume=False) as folder:
        for step in range(1, 5):
            folder.append({"kind": "step", "step": step, "loss": math.nan})
    page = page_of(tmp_path)
    assert "final loss not finite" in page.text
    assert "not finite in 4 records" in page.text


@pytest.mark.parametrize(
    ("equal", "said"), [(False, "differ replicas do not hold the same parameters"), (None, "")], ids=str
)
def test_replicas_that_differ_or_were_not_compared(tmp_path: Path, equal: bool | None, said: str) -> None:
    page = page_of(make_run(tmp_path / "run", steps=0, replicas_equal=equal))
    assert said in page.text
    assert ("replicas" in page.text) == bool(said)
    assert "all replicas hold" not in page.text


def test_the_time_of_a_resumed_run_is_that_of_all_parts(tmp_path: Path) -> None:
    with RunFolder(tmp_path, resume=False) as folder:
        for step, time in ((1, 50.0), (2, 100.0), (3, 30.0), (4, 60.0)):
            folder.append({"kind": "step", "step": step, "loss": 1.0, "time": time})
        folder.write_summary({"seconds": 61.0})
    assert "time 2 min 40 s 4 steps" in page_of(tmp_path).text


def test_everything_from_the_run_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
    with RunFolder(tmp_path / "run", resume=False) as folder:
        folder.write_config({"model": evil, "data": evil, evil: {evil: evil}, "machine": evil, "torch": [evil]})
        folder.append({"kind": "step", "step": 1, "loss": 1.0})
        folder.note(1, evil)
        folder.write_summary({evil: evil, "digest": evil})
    page = page_of(tmp_path / "run")
    assert page.scripts == 1
    assert evil in page.text


def test_no_run_and_no_jinja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"has neither"):
        write_report(tmp_path)
    path = make_run(tmp_path / "run", steps=2)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'gradsync\[train\]'"):
        write_report(path)


def test_without_matplotlib_the_page_has_its_words_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = page_of(make_run(tmp_path / "run", steps=30))
    assert page.images == []
    assert "There are no charts on this page: pictures and pages need matplotlib" in page.text
    assert "pip install 'gradsync[train]'" in page.text
    assert "The training loss went from" in page.text
    assert re.search(r"synchronization \d\.\d% · \d+(\.\d)? ms", page.text)


def test_a_chart_that_fails_costs_only_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr("gradsync.tools.llm.report.draw_columns", fail)
    page = page_of(make_run(tmp_path / "run", steps=30))
    assert "Not all charts could be drawn: RuntimeError: no ink" in page.text
    assert "loss-928-title" in page.images


def test_a_training_ends_well_without_the_packages_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    console = Console(file=io.StringIO(), width=200)
    proof = SimpleNamespace(equal=True, digests=["9f2c4b"])
    outcome: Any = SimpleNamespace(step=0, signal=0, proof=proof, validation_loss=None)
    RunRecorder(RunFolder(tmp_path / "run", resume=False), console).close(outcome)
    assert (tmp_path / "run" / "summary.json").exists()
    assert "report" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "pip install 'gradsync[train]'" in console.file.getvalue()  # type: ignore[attr-defined]


# -- in a browser ------------------------------------------------------------------------------------------------------


def painted(image: Path) -> float:
    """The share of a PNG's bytes that differ from their neighbours: 0 of a page of one colour."""
    content, position, data = image.read_bytes(), 8, b""
    assert content.startswith(b"\x89PNG")
    while position < len(content):
        length = int.from_bytes(content[position : position + 4], "big")
        if content[position + 4 : position + 8] == b"IDAT":
            data += content[position + 8 : position + 8 + length]
        position += length + 12
    pixels = zlib.decompress(data)
    # Rows are stored as differences from the pixel before or above, whichever packs better.
    return 1 - pixels.count(0) / len(pixels)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of 200 steps."""
    return write_report(make_run(tmp_path_factory.mktemp("shown") / "run", steps=200))


@pytest.mark.program
@needs_chromium
def test_the_console_stays_empty_and_the_charts_are_there(tmp_path: Path, shown: Path) -> None:
    dom, console = browse(shown, tmp_path, "--dump-dom")
    assert console == []
    assert dom.count("<svg") == 8
    # The script has run: it lays a pane over each chart that reads out values, all but bars.
    assert dom.count('fill="transparent"') == 8
    assert 'id="readout"' in dom


@pytest.mark.program
@needs_chromium
def test_an_error_on_a_page_is_seen(tmp_path: Path, shown: Path) -> None:
    page = tmp_path / "wrong.html"
    page.write_text(shown.read_text().replace("// Reads out", "nowhere.to.be.found(); // Reads out"))
    _, console = browse(page, tmp_path, "--dump-dom")
    assert len(console) == 1
    assert "nowhere is not defined" in console[0]


@pytest.mark.program
@needs_chromium
@pytest.mark.parametrize("width", [480, 1200])
def test_a_picture_of_the_page(tmp_path: Path, shown: Path, width: int) -> None:
    browse(shown, tmp_path, f"--window-size={width},1600", f"--screenshot={tmp_path / 'page.png'}")
    assert painted(tmp_path / "page.png") > 0.01


@pytest.mark.program
@needs_chromium
def test_a_blank_page_is_seen(tmp_path: Path) -> None:
    (tmp_path / "blank.html").write_text("<!doctype html><title>blank</title>")
    browse(tmp_path / "blank.html", tmp_path, "--window-size=480,1600", f"--screenshot={tmp_path / 'page.png'}")
    assert painted(tmp_path / "page.png") < 0.005
