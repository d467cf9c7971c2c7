"""Scenarios bucket-size, scaling, round-robin and wire: what they say of given samples, without running ranks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.tools.bench.record import Cell, CellRecord, Sample
from gradsync.tools.bench.scenario import Scenario
from gradsync.tools.bench.scenarios.buckets import AUTO, BucketSize, RoundRobin, size_name
from gradsync.tools.bench.scenarios.scaling import HOST, Scaling
from gradsync.tools.bench.scenarios.wire import GLOO, WireScenario, calls_of, fit_line, places_of
from gradsync.tools.bench.scenarios.wire import variant_name as wire_name

SCENARIOS: list[Scenario] = [BucketSize(), Scaling(), RoundRobin(), WireScenario()]


def record_of(cell: Cell, seconds: dict[str, float], **facts: object) -> CellRecord:
    """Three rounds that all took the same time."""
    record = CellRecord(cell=cell, facts=dict(facts), outcome="done")
    for variant, time in seconds.items():
        sample = Sample(seconds=time, sent=0, parts={HOST: time / 10})
        record.samples[variant] = dict.fromkeys(range(3), sample)
    return record


@given(
    latency=st.floats(0, 0.1),
    per_byte=st.floats(1e-11, 1e-6),
    sizes=st.sets(st.integers(10, 26).map(lambda power: 2**power), min_size=2),
)
def test_a_line_is_found_again(latency: float, per_byte: float, sizes: set[int]) -> None:
    times = {size: latency + size * per_byte for size in sizes}
    found_latency, found_per_byte = fit_line(times)
    for size, seconds in times.items():
        assert found_latency + size * found_per_byte == pytest.approx(seconds, rel=1e-5)


@given(times=st.dictionaries(st.integers(1, 10**8), st.floats(1e-7, 10), min_size=1))
def test_no_fit_is_negative(times: dict[int, float]) -> None:
    assert min(fit_line(times)) >= 0


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_cells_can_be_stored(scenario: Scenario, quick: bool) -> None:
    cells = scenario.cells(quick=quick)
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert json.loads(json.dumps(dict(cell.options))) == cell.options
        assert cell.hosts is None or cell.ranks % cell.hosts == 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("variant", ["no wrapper", "gradsync", "DDP tuned", AUTO, "1 group", wire_name(GLOO, 4096)])
def test_what_is_missing_is_borne(scenario: Scenario, variant: str) -> None:
    """A run that was interrupted has shown one variant of one cell."""
    record = record_of(scenario.cells(quick=True)[0], {variant: 0.1})
    assert all(len(row) == len(table.columns) for table in scenario.tables([record]) for row in table.rows)
    assert all(picture.title for picture in scenario.pictures([record]))
    assert isinstance(scenario.reading([record]), str)


def test_the_best_fixed_size_is_what_auto_is_held_against() -> None:
    scenario = BucketSize()
    sizes = [1.0, 0.5, 0.25]
    seconds = {size_name("gradsync", size): time for size, time in zip(sizes, (0.3, 0.1, 0.2), strict=True)}
    seconds |= {size_name("DDP tuned", size): 0.2 for size in sizes} | {AUTO: 0.12}
    caps = {"caps": [2**19], "from the end": False}
    record = record_of(scenario.cells(quick=True)[0], seconds, **{"sizes in MiB": sizes, "auto": caps})
    _, best, auto, against_ours, against_ddp = scenario.tables([record])[0].rows[0]
    assert (best, auto) == ("0.50 MiB", "0.50 MiB")
    assert against_ours.startswith("1.20 ")
    assert against_ddp.startswith("0.60 ")
    assert "within 20 %" in scenario.pictures([record])[0].title


def test_efficiency_is_against_one_process_without_a_wrapper() -> None:
    scenario = Scaling()
    single, several = (cell for cell in scenario.cells(quick=True) if cell.ranks in (1, 4) and "1 G" not in cell.name)
    times = {"no wrapper": 0.1, "DDP tuned": 0.1, "gradsync": 0.1}
    records = [record_of(single, times, cores=2), record_of(several, {**times, "gradsync": 0.125}, cores=2)]
    rows = {(row[0], row[1]): row[2:] for row in scenario.tables(records)[0].rows}
    # A tenth of a core for each of four ranks, on two cores.
    assert rows[several.name, "gradsync"] == ["125.0", "80 %", "20 %"]
    assert rows[several.name, "no wrapper"] == ["100.0", "100 %", "20 %"]


def test_bandwidth_counts_every_repeated_message() -> None:
    cell = next(cell for cell in WireScenario().cells(quick=True) if cell.ranks == 4 and cell.rate is not None)
    size = cell.options["sizes"][0]
    record = record_of(cell, {wire_name(GLOO, size): 0.001 * calls_of(cell, GLOO, size)})
    (place,) = places_of([record])
    assert place.seconds[GLOO][size] == pytest.approx(0.001)
    assert place.bus(GLOO, size) == pytest.approx(1.5 * size / 0.001)
    assert place.rate == 50e6
