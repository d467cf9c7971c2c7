"""Files that were cut off, edited or written by another version: said to be wrong, and where, whatever is in them."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradsync.base.files import from_json
from gradsync.errors import ConfigurationError
from gradsync.observe.explain import explain_recordings
from gradsync.observe.plan.calibration import Calibration, recorded
from gradsync.observe.plan.library import published
from gradsync.observe.plan.planner import Setting, predict
from gradsync.observe.recording import RecordedBucket, read_recordings
from gradsync.observe.recording.files import file_name, lines_of
from gradsync.tools.run.account import account_path, read_account, summarize
from tests.recordings import Loop, World

GONE = object()
WRONG = (None, "x", -1, 0, float("nan"), float("inf"), [], {}, True, 1e300, 10**300, 10**400, GONE)


def spoiled(data: Any) -> Iterator[Any]:
    """The data with each of its values, but of arrays only the first, exchanged for each of the wrong ones."""
    for path in places(data):
        for wrong in WRONG:
            copied = copy.deepcopy(data)
            inner = copied
            for key in path[:-1]:
                inner = inner[key]
            if wrong is GONE:
                del inner[path[-1]]
            else:
                inner[path[-1]] = wrong
            yield copied


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys: list[Any] = list(data) if isinstance(data, dict) else [0] if isinstance(data, list) and data else []
    for key in keys:
        yield (*path, key)
        yield from places(data[key], (*path, key))


def read_or_refuse(read: Callable[[], object]) -> bool:
    try:
        read()
    except ConfigurationError:
        return True
    return False


@pytest.mark.breadth
@pytest.mark.parametrize("line", [0, 1, 2, -1], ids=["header", "layout", "step", "end"])
def test_a_recording_with_a_wrong_value_is_read_or_refused(line: int, tmp_path: Path) -> None:
    whole = [list(lines_of(each)) for each in World(ranks=[Loop(), Loop()], steps=3, buckets=(4, 4)).record()]
    (tmp_path / file_name(1, 0)).write_text("\n".join(whole[1]))
    told = json.loads(whole[0][line]) | ({"link": [1e-4, 1e-9]} if line == 0 else {})
    refused = 0
    for wrong in spoiled(told):
        lines = list(whole[0])
        lines[line] = json.dumps(wrong)
        (tmp_path / file_name(0, 0)).write_text("\n".join(lines))
        refused += read_or_refuse(lambda: str(explain_recordings(read_recordings(tmp_path))))
        read_or_refuse(lambda: recorded(tmp_path))
    assert refused > len(WRONG)


@pytest.mark.breadth
def test_a_calibration_with_a_wrong_value_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    calibration = published("v100-100g", "resnet50")
    few = dataclasses.replace(calibration.profile, buckets=calibration.profile.buckets[:2])
    dataclasses.replace(calibration, profile=few).save(path)
    setting = Setting(ranks=2, bucket_mb=1.0, reduction="int8")
    refused = 0
    for wrong in spoiled(json.loads(path.read_text())):
        path.write_text(json.dumps(wrong))
        refused += read_or_refuse(lambda: predict(Calibration.load(path), setting))
    assert refused > len(WRONG)


def test_an_account_with_a_wrong_value_is_read_or_refused(tmp_path: Path) -> None:
    wrapper = {"kind": "torch", "model": "Net", "parameters": 3, "nbytes": 12, "buckets": 1, "steps": 2}
    wrapper |= {"backwards": 4, "synchronized": 4, "wasted": 2, "collectives": 4, "broadcasts": 0}
    wrapper |= {"backward_with": 0.2, "backward_without": None, "wire": 0.1, "hidden": 0.0}
    account = {
        "version": 1,
        "rank": 0,
        "world_size": 1,
        "host": "a",
        "kept": True,
        "steps": 2,
        "called": {"barrier": 1},
    }
    seconds = dict.fromkeys(("data", "forward", "backward", "optimizer", "rest"), 0.1)
    path = account_path(tmp_path, 0)
    refused = 0
    for wrong in spoiled(account | {"seconds": seconds, "called": {"barrier": 1}, "wrappers": [wrapper]}):
        path.write_text(json.dumps(wrong))
        refused += read_or_refuse(lambda: summarize([read_account(path)], "script.py"))
    assert refused > len(WRONG)


def test_what_is_wrong_is_said_with_its_place() -> None:
    told = json.loads(json.dumps(dataclasses.asdict(published("v100-100g", "resnet50"))))
    assert from_json(Calibration, told) == published("v100-100g", "resnet50")
    told["profile"]["buckets"][3]["nbytes"] = True
    with pytest.raises(ValueError, match=r"^profile\.buckets\[3\]\.nbytes: expected a whole number, got True$"):
        from_json(Calibration, told)


def test_an_object_may_be_an_array_in_the_order_of_its_fields() -> None:
    assert from_json(RecordedBucket, [1, None, 2, 3.5, None]) == RecordedBucket(index=1, start=2.0, reduced=3.5)
    assert from_json(RecordedBucket, [1, None, 2]) == RecordedBucket(index=1, start=2.0)
    with pytest.raises(ValueError, match="start is missing"):
        from_json(RecordedBucket, [1, 2])
    with pytest.raises(ValueError, match="expected an object"):
        from_json(RecordedBucket, [1, None, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match="start is missing"):
        from_json(RecordedBucket, {"index": 1, "colour": "red"})
