"""The scenarios ``compression`` and ``time-to-loss``: their words and numbers, of samples that are given."""

import pytest

from gradsync.tools.bench.record import Cell, CellRecord, Sample
from gradsync.tools.bench.scenarios.compression import (
    EXACT,
    REDUCTIONS,
    SENT_COLOURS,
    STEPS_A_ROUND,
    Compression,
    Curves,
    TimeToLoss,
    variant_name,
)
from gradsync.tools.bench.scenarios.compression import reduction_name as seeded

pytestmark = pytest.mark.timeout(120)


def learned(losses: dict[str, list[float]], seconds: dict[str, float], *, seeds: int = 2) -> CellRecord:
    """Every seed ends higher than the one before it, by one; rounds of a reduction take the same time."""
    samples = {
        seeded(name, seed): {
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


def test_what_has_not_run_is_left_out() -> None:
    whole = dict.fromkeys(SENT_COLOURS, FALLING)
    for known in ([EXACT], ["int8", "int4"], [EXACT, "int8"]):
        record = learned({name: whole[name][:2] for name in known}, dict.fromkeys(known, 1.0))
        assert TimeToLoss().tables([record])
        assert TimeToLoss().pictures([record])
        assert "nothing has reached" in TimeToLoss().reading([record])


def test_compression_says_how_fast_and_how_much() -> None:
    times = {"no wrapper": 0.05, "DDP tuned": 0.4, "gradsync": 0.4, **dict.fromkeys(map(variant_name, REDUCTIONS), 0.2)}
    times[variant_name("int8")] = 0.1
    sent = dict.fromkeys(times, 1000) | {variant_name("int8"): 260}
    samples = {
        name: {number: Sample(seconds=value, sent=sent[name], parts={}) for number in range(3)}
        for name, value in times.items()
    }
    record = CellRecord(cell=Cell(name="here", hosts=2), samples=samples, outcome="done")
    faster, fewer = Compression().overview([record])
    place = faster.columns.index(variant_name("int8"))
    assert (faster.rows[0][place], fewer.rows[0][place]) == ("4.00×", "0.260")
    assert "up to 4.00 times as fast" in Compression().reading([record])
    del record.samples["DDP tuned"]
    assert Compression().tables([record])
    assert Compression().pictures([record])
