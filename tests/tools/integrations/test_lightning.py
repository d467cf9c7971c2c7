"""gradsync's strategies for Lightning's Trainer and for Fabric."""

import json
import re
from pathlib import Path

import pytest

from tests import lightning_suite
from tests.scripts import run_scripts

ROOT = Path(__file__).parents[3]
SUITE = ROOT / "tests" / "lightning_suite.py"
# Most of the time that Lightning takes to be imported.
PRELOADED = ("torchmetrics", "torch._dynamo")


@pytest.mark.program
@pytest.mark.timeout(500)
def test_what_lightning_documents_of_its_strategies_holds_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    ran = run_scripts(
        [SUITE], ranks=2, folder=tmp_path, arguments=[str(tmp_path / "out")], timeout=450, preload=PRELOADED
    )[SUITE]
    assert ran.error is None, ran.error
    for rank in range(2):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        assert found.keys() >= lightning_suite.CHECKS.keys()
        unlike = {name for name, (told, _) in found.items() if told}
        assert unlike - lightning_suite.CLOSE == lightning_suite.DIFFERENT.keys(), ran.output
        assert all(found[name][1] < 1e-6 for name in lightning_suite.CLOSE)


def test_the_page_lists_every_check() -> None:
    page = (ROOT / "docs" / "lightning-tests.md").read_text()
    rows = dict(re.findall(r"^\| (`\w+`(?: \*)?) \| (.*) \|$", page, re.MULTILINE))
    checks, different, sharded = (
        len(each) for each in (lightning_suite.CHECKS, lightning_suite.DIFFERENT, lightning_suite.SHARDED)
    )
    assert set(rows) == {
        f"`{name}`{' *' if name in lightning_suite.SHARDED else ''}" for name in lightning_suite.CHECKS
    }
    assert {name: rows[f"`{name}`"] for name in lightning_suite.DIFFERENT} == lightning_suite.DIFFERENT
    told = re.sub(r"\s+", " ", page)
    assert f"Of the {checks} checks, {checks - different} give the same bits and" in told
    assert f"The {sharded} checks marked with *" in told
