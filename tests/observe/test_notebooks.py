"""What objects say of themselves: in one line at a prompt, and as HTML in a notebook."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync import Accelerator, DistributedDataParallel, Timeline, synchronize_gradients
from gradsync.communicator import InProcessWorld
from gradsync.observe.charts.canvas import PARTS
from gradsync.observe.explain import explain_recordings
from gradsync.observe.explain.explanation import NAMES
from gradsync.observe.explain.split import PARTS as STEP_PARTS
from gradsync.observe.recording import GatherTimes
from gradsync.observe.timeline import BucketTimes, StepTimes, as_html
from gradsync.testing import run_ranks
from tests.recordings import Loop, World


class Fragment(HTMLParser):
    """Strict: what is opened is closed, and nothing is loaded or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.bars: list[tuple[float, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "table", "tr", "td", "th", "svg", "rect", "title", "span", "br"}, tag
        given = dict(attrs)
        assert set(given) <= {"style", "width", "height", "x", "y", "fill"}, given
        assert "url(" not in str(given.get("style"))
        if tag == "rect":
            self.bars.append((float(given["width"] or 0), str(given["fill"])))
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1] == tag
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


# -- one line ---------------------------------------------------------------------------------------------------------


def test_an_accelerator_says_where_it_is_and_what_it_has() -> None:
    def ranks() -> str:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        before = repr(accelerator)
        assert "0 models prepared" in before
        accelerator.prepare(nn.Linear(3, 3))
        return repr(accelerator)

    assert run_ranks(ranks, 2) == [
        f"Accelerator(rank {rank} of 2 on cpu, 1 model prepared, mixed_precision='no', gradient_accumulation_steps=4)"
        for rank in range(2)
    ]


def test_an_attached_engine_says_what_it_is_attached_to() -> None:
    attached = synchronize_gradients(nn.Linear(3, 4), communicator=InProcessWorld(1).communicator(0))
    words = (
        "GradientSynchronization(Linear: 2 parameters, 64 B; rank 0 of 1 over InProcessCommunicator (it was given); "
    )
    assert repr(attached) == words + "idle)"
    attached.detach()
    assert repr(attached) == words + "detached)"


# -- notebooks --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.builds(Loop, forward=st.floats(1e-3, 0.1), loop=st.floats(0, 0.1)), min_size=1, max_size=3),
    st.integers(1, 25),
)
def test_a_notebook_shows_what_the_text_says(ranks: list[Loop], steps: int) -> None:
    explanation = explain_recordings(World(ranks=ranks, steps=steps).record())
    page = Fragment(explanation._repr_html_())
    numbers = re.compile(r"\d[\d.,]*(?: [mµ]?s|%)")
    assert set(numbers.findall(str(explanation))) <= set(numbers.findall(page.text))
    for words in (explanation.headline, *explanation.who(), *(each.cause for each in explanation.advice)):
        assert " ".join(words.split()) in page.text
    mean = explanation.split.mean
    whole = page.bars[: sum(getattr(mean, name) > 0 for name in STEP_PARTS)]
    assert [fill for _, fill in whole] == [PARTS[name] for name in STEP_PARTS if getattr(mean, name) > 0]
    assert all(NAMES.get(name, name) in page.text for name in STEP_PARTS)


def test_names_from_a_model_are_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>&"
    recordings = [
        dataclasses.replace(
            each, layouts=tuple(tuple(dataclasses.replace(b, parameters=(evil,)) for b in each.layouts[0]) for _ in "1")
        )
        for each in World(ranks=[Loop(), Loop()]).record()
    ]
    html = explain_recordings(recordings)._repr_html_()
    assert "<img" not in html
    assert evil in Fragment(html).text


def test_a_timeline_in_a_notebook_is_its_last_step() -> None:
    assert Fragment(Timeline()._repr_html_()).text == "no synchronized backward recorded yet"
    step = StepTimes(
        buckets=[
            BucketTimes(index=0, nbytes=1 << 20, ready=0.004, start=0.006, reduced=0.014, finish=0.03),
            BucketTimes(index=1, nbytes=1 << 10, ready=0.02, start=0.02, reduced=None, finish=0.03),
            BucketTimes(index=2, nbytes=8),
        ],
        gathers=[GatherTimes(index=1, nbytes=1 << 20, start=-0.01, end=-0.005)],
        backward_end=0.02,
        finished=0.03,
    )
    page = Fragment(as_html(step))
    assert page.text.startswith("gathers begin 10.00 ms before backward; it ends at 20.00 ms, synchronized at 30.00 ms")
    for words in ("bucket 0 1 MiB", "communication behind backward: 8 ms", "communication after backward: 10 ms"):
        assert words in page.text
    # 640 pixels are 40 ms.
    for milliseconds, part in ((20, "backward"), (2, "waiting"), (8, "hidden"), (10, "exposed"), (5, "update")):
        assert (pytest.approx(16.0 * milliseconds), PARTS[part]) in page.bars


def test_a_timeline_of_a_training_is_drawn() -> None:
    def train() -> str:
        timeline = Timeline(keep=5)
        assert repr(timeline) == "Timeline(keep=5, 0 steps recorded)"
        model = DistributedDataParallel(nn.Linear(4, 4), observer=timeline)
        model(torch.ones(2, 4)).sum().backward()
        assert repr(timeline) == "Timeline(keep=5, 1 step recorded)"
        return timeline._repr_html_()

    for html in run_ranks(train, 2):
        assert "bucket 0" in Fragment(html).text
