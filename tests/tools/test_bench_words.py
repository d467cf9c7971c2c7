"""What the scenarios say and draw of given samples, without running ranks."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.tools.bench.peers import PEERS
from gradsync.tools.bench.record import EVERY, Cell, CellRecord, Sample
from gradsync.tools.bench.scenario import Scenario
from gradsync.tools.bench.scenarios import SCENARIOS
from gradsync.tools.bench.scenarios.buckets import AUTO, BucketSize, size_name
from gradsync.tools.bench.scenarios.communicators import GLOO, Communicators, calls_of, fit_latency, places_of
from gradsync.tools.bench.scenarios.communicators import variant_name as message_name
from gradsync.tools.bench.scenarios.compression import (
    REDUCTIONS,
    Compression,
    variant_name,
)
from gradsync.tools.bench.scenarios.convergence import Convergence
from gradsync.tools.bench.scenarios.peers import Peers
from gradsync.tools.bench.scenarios.scaling import Scaling
from gradsync.tools.bench.scenarios.time_to_loss import EXACT, STEPS_A_ROUND, Curves, TimeToLoss, reduction_name
from tests.tools.bench_samples import VARIANTS, record_of, trained

pytestmark = pytest.mark.timeout(120)

HERE = Cell(name="here", hosts=2)


# -- all of them ------------------------------------------------------------------------------------------------------

SPEAKS = ("accumulation", "overlap", "skip-sync", "time-to-loss", "far", "convergence", "peers")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_bears_that_variants_are_missing(scenario: Scenario) -> None:
    """As a run that was interrupted, or without a package, leaves them."""
    names, cell = VARIANTS[scenario.name], scenario.cells(quick=True)[0]
    for known in (names, names[:1], names[1:2], names[1:], names[:3], names[-2:], names[::2]):
        record = record_of(cell, dict.fromkeys(known, 0.1), **{"sizes in MiB": [0.5, 1.0]})
        record.absent["Accelerate"] = "not installed"
        tables = scenario.tables([record])
        assert tables
        assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
        assert all(picture.title for picture in scenario.pictures([record]))
        assert bool(scenario.reading([record])) >= (scenario.name in SPEAKS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_cells_can_be_stored(scenario: Scenario) -> None:
    for quick in (True, False):
        cells = scenario.cells(quick=quick)
        assert len({cell.name for cell in cells}) == len(cells)
        for cell in cells:
            assert json.loads(json.dumps(dict(cell.options))) == cell.options
            assert cell.hosts is None or cell.ranks % cell.hosts == 0


# -- one by one -------------------------------------------------------------------------------------------------------


@given(
    latency=st.floats(0, 0.1),
    per_byte=st.floats(1e-11, 1e-6),
    sizes=st.sets(st.integers(10, 26).map(lambda power: 2**power), min_size=2),
)
def test_a_line_is_found_again(latency: float, per_byte: float, sizes: set[int]) -> None:
    times = {size: latency + size * per_byte for size in sizes}
    found_latency, found_per_byte = fit_latency(times)
    for size, seconds in times.items():
        assert found_latency + size * found_per_byte == pytest.approx(seconds, rel=1e-5)


@given(times=st.dictionaries(st.integers(1, 10**8), st.floats(1e-7, 10), min_size=1))
def test_no_fit_is_negative(times: dict[int, float]) -> None:
    assert min(fit_latency(times)) >= 0


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
    cell = next(cell for cell in Communicators().cells(quick=True) if cell.ranks == 4 and cell.rate is not None)
    size = cell.options["sizes"][0]
    record = record_of(cell, {message_name(GLOO, size): 0.001 * calls_of(cell, GLOO, size)})
    (place,) = places_of([record])
    assert place.seconds[GLOO][size] == pytest.approx(0.001)
    assert place.bus(GLOO, size) == pytest.approx(1.5 * size / 0.001)
    assert place.rate == 50e6


def timed(seconds: dict[str, float], *, sent: dict[str, int] | None = None) -> CellRecord:
    """A cell between hosts in which every variant always takes the same time."""
    limits = {"compute": "no wrapper", "wire": {EVERY: 0.05}}
    return record_of(HERE, seconds, sent=sent, **{"limits": limits, "gradient bytes": 4_000_000})


def weighed(name: str, *peaks: float) -> CellRecord:
    steps = {number: Sample(seconds=0.1, sent=0, parts={"peak bytes": peak}) for number, peak in enumerate(peaks)}
    cell = Cell(name=f"memory, {name}", emulated=False, options={"memory": name})
    return CellRecord(cell=cell, samples={name: steps}, facts={"gradient bytes": 100e6}, outcome="done")


EVEN = {**dict.fromkeys(PEERS, 0.12), "no wrapper": 0.1}


def test_peers_says_where_gradsync_is_behind_and_only_there() -> None:
    words = Peers().reading([timed(EVEN)])
    assert "behind" not in words
    assert "No peer is ahead" in words
    words = Peers().reading([timed({**EVEN, "Accelerate": 0.11})])
    assert re.search(r"behind in: time, here, 1\.09 \(1\.09–1\.09\) of Accelerate\.", words)
    words = Peers().reading([timed(EVEN, sent={"DDP tuned": 900})])
    assert "behind in: bytes, here, 1.11 of DDP tuned." in words
    words = Peers().reading([timed(EVEN), weighed("gradsync", 300e6, 200e6, 200e6), weighed("naive", 200e6)])
    assert "behind in: peak memory, 1.50 of naive (1 run)." in words
    runs = [weighed("gradsync", 107e6), weighed("gradsync", 105e6), weighed("naive", 100e6), weighed("naive", 101e6)]
    assert "settled memory, 1.05 of naive (2 runs)" in Peers().reading(runs)
    # One run of the peer was as heavy: that is noise.
    assert "behind" not in Peers().reading([*runs, weighed("naive", 106e6)])
    # Without a wrapper nothing is synchronized: that is no peer.
    assert "no wrapper" not in Peers().reading([timed(EVEN), weighed("gradsync", 200e6), weighed("no wrapper", 100e6)])


def test_noise_is_not_called_behind() -> None:
    record = timed(EVEN)
    times = enumerate((0.11, 0.12, 0.13))
    record.samples["DDP tuned"] = {number: Sample(seconds=time, sent=1000, parts={}) for number, time in times}
    assert "behind" not in Peers().reading([record])


@pytest.mark.parametrize("known", [["no wrapper"], ["naive", "DDP stock"], list(PEERS), []])
def test_peers_bears_that_memory_is_missing(known: list[str]) -> None:
    record = timed({name: EVEN[name] for name in known})
    record.absent["Accelerate"] = "not installed"
    records = [record, *(weighed(name, 100e6, 90e6) for name in known)]
    assert Peers().reading(records)
    assert any("not installed" in row for row in Peers().tables(records)[0].rows)
    assert Peers().pictures(records)


def test_convergence_says_which_batch_is_harmed() -> None:
    harmed = Convergence().reading([trained(harm=0.05)])
    assert re.search(r"Batch 8,[^.]*n = 2 \+0\.000[^:]*\(no harm\)", harmed)
    assert "n = 8 +0.350 (harmed with every seed: n = 2, n = 4, n = 8)" in harmed
    assert "saves 0.3 s of 0.0 s" not in harmed
    assert "harmed" not in Convergence().reading([trained(harm=0.0)])


def learned(losses: dict[str, list[float]], seconds: dict[str, float], *, seeds: int = 2) -> CellRecord:
    """Every seed ends higher than the one before it, by one; rounds of a reduction take the same time."""
    samples = {
        reduction_name(name, seed): {
            number: Sample(seconds=9.0, sent=1000, parts={"training": seconds[name], "loss": loss + seed})
            for number, loss in enumerate(curve)
        }
        for name, curve in losses.items()
        for seed in range(seeds)
    }
    options = {"seeds": seeds, "target": 3 * STEPS_A_ROUND, "batch": 4}
    return CellRecord(cell=Cell(name="here", hosts=2, options=options), samples=samples, outcome="done")


FALLING = [4.0, 3.0, 2.0, 1.5]


def test_the_time_to_the_loss_of_exact_steps() -> None:
    later = [4.0, 3.0, 2.5, 1.5]
    record = learned(
        {EXACT: FALLING, "int8": FALLING, "int4": later, "bf16": [4.0, 3.9, 3.8, 3.7]},
        {EXACT: 10.0, "int8": 2.5, "int4": 2.0, "bf16": 5.0},
    )
    curves = Curves(record)
    reached = curves.reached("int8", 1)
    assert reached is not None
    assert (reached.steps, reached.seconds) == (3 * STEPS_A_ROUND, 7.5)
    assert curves.gains("int8") == [4.0, 4.0]
    # Means of three fall from 19/6 to 14/6 in the fourth round, and through 3 after a fifth of it.
    slower = curves.reached("int4", 0)
    assert slower is not None
    assert (slower.steps, slower.seconds) == (pytest.approx(3.2 * STEPS_A_ROUND), pytest.approx(6.4))
    assert curves.reached("bf16", 0) is None
    assert "With int4 the loss of 75 exact steps is reached 4.7 times as soon." in TimeToLoss().reading([record])
    rows = {row[0]: row for row in TimeToLoss().tables([record])[0].rows}
    assert rows["bf16"][4] == "0 of 2"
    assert rows["int8"][3] == "3.500 (3.000 to 4.000)"
    assert TimeToLoss().pictures([record])


def test_compression_says_how_fast_and_how_much() -> None:
    times = {"no wrapper": 0.05, "DDP tuned": 0.4, "gradsync": 0.4, **dict.fromkeys(map(variant_name, REDUCTIONS), 0.2)}
    times[variant_name("int8")] = 0.1
    sent = dict.fromkeys(times, 1000) | {variant_name("int8"): 260}
    record = record_of(HERE, times, sent=sent)
    faster, fewer = Compression().overview([record])
    place = faster.columns.index(variant_name("int8"))
    assert (faster.rows[0][place], fewer.rows[0][place]) == ("4.00×", "0.260")
    assert "up to 4.00 times as fast" in Compression().reading([record])
