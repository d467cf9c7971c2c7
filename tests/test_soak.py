"""The soak finds what is wrong, and says how to see it again."""

from typing import Any

import pytest
import torch

from gradsync.core.engine.pipeline import Pipeline
from tests import soak
from tests.ranks import ThreadRanks

THREADS = (("threads", 2), ("threads", 3))


@pytest.mark.parametrize("seed", range(8))
def test_trainings_of_fixed_seeds_are_exact(seed: int) -> None:
    case = soak.draw(seed, THREADS)
    assert ThreadRanks(case.world[1]).run(soak.train, seed, THREADS) == [[]] * case.world[1], str(case)


def test_a_case_is_drawn_from_its_seed_alone() -> None:
    assert soak.draw(7) == soak.draw(7)
    assert len({str(soak.draw(seed)) for seed in range(20)}) == 20


def test_an_engine_that_is_off_by_a_little_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish = Pipeline.finish

    def distort(self: Pipeline, **options: Any) -> None:
        finish(self, **options)
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.payload.mul_(1 + 1e-6)

    monkeypatch.setattr(Pipeline, "finish", distort)
    monkeypatch.setattr(soak, "WORLDS", THREADS)
    assert soak.main(["--minutes", "1", "--first", "0"]) == 1
    told = capsys.readouterr().out
    assert "off by" in told
    assert "--seed 0" in told
