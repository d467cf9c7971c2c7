"""The folder of a run, and what is left of it when something goes wrong."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.errors import ConfigurationError, GradsyncError
from gradsync.tools.llm.run_folder import RunFolder, read_json, read_metrics, read_run
from tests.zygote import run_python


def step(number: int, loss: float = 1.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": loss, "seconds": {"forward": 0.1, "backward": 0.2}}


def make(path: Path, steps: int = 3) -> Path:
    with RunFolder(path, resume=False) as folder:
        folder.write_config({"model": "tiny", "steps": 10, "resume": False})
        for number in range(1, steps + 1):
            folder.append(step(number))
    return path


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a" / "run", resume=False) as folder:
        folder.write_config({"model": "tiny", "path": Path("x"), "dtype": torch.bfloat16, "nested": {"a": (1, 2)}})
        folder.append(step(1, 3.5))
        folder.append({"kind": "validation", "step": 1, "loss": torch.tensor(3.25)})
        folder.note(1, "NaN")
        folder.write_summary({"loss": 3.5})
    path = tmp_path / "a" / "run"
    config = read_json(path / "config.json")
    assert config == {"model": "tiny", "path": "x", "dtype": "torch.bfloat16", "nested": {"a": [1, 2]}}
    assert read_metrics(path) == read_metrics(path / "metrics.jsonl")
    run = read_run(path)
    assert run.series("loss") == [(1, 3.5)]
    assert run.validations[0]["loss"] == 3.25
    assert run.notes == [{"kind": "note", "step": 1, "text": "NaN"}]
    assert run.finished
    assert sorted(entry.name for entry in path.iterdir()) == ["config.json", "metrics.jsonl", "summary.json"]


def test_numbers_json_has_no_digits_for(tmp_path: Path) -> None:
    with RunFolder(tmp_path, resume=False) as folder:
        for number, loss in enumerate((math.nan, math.inf, -math.inf), start=1):
            folder.append(step(number, loss))
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    losses = [record["loss"] for record in read_metrics(tmp_path)]
    assert math.isnan(losses[0])
    assert losses[1:] == [math.inf, -math.inf]


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    """Also for a process that ends without a word."""
    code = (
        "import os, sys; from gradsync.tools.llm.run_folder import RunFolder\n"
        "folder = RunFolder(sys.argv[1], resume=False)\n"
        "folder.note(1, 'written'); os._exit(9)"
    )
    result = run_python("-c", code, str(tmp_path))
    assert result.returncode == 9
    assert [record["text"] for record in read_metrics(tmp_path)] == ["written"]


@pytest.mark.parametrize("half", [b'{"kind": "step", "st', b"{", b'{"kind": "note", "step": 3, "text": "\xc3'])
def test_a_half_line_is_cut_off(tmp_path: Path, half: bytes) -> None:
    metrics = make(tmp_path / "run") / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + half)
    assert len(read_metrics(metrics)) == 3, "a run under way is read without its last line"
    with RunFolder(tmp_path / "run", resume=True) as folder:
        assert metrics.read_bytes() == whole
        folder.append(step(4))
    assert [record["step"] for record in read_metrics(metrics)] == [1, 2, 3, 4]


def test_a_resumed_run_drops_what_it_does_again(tmp_path: Path) -> None:
    path = make(tmp_path / "run", steps=5)
    with RunFolder(path, resume=True) as folder:
        folder.write_summary({"step": 5})
        assert folder.rewind(3) == 2
        assert not (path / "summary.json").exists(), "a run that goes on is not finished"
        folder.note(3, "resumed from step 3")
        folder.append(step(4, 9.0))
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 3, 4]
    assert read_metrics(path)[-1]["loss"] == 9.0


def test_the_first_configuration_stays(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    before = (path / "config.json").read_text()
    with RunFolder(path, resume=True) as folder:
        folder.rewind(2)
        folder.write_config({"model": "tiny", "steps": 20, "resume": True})
    assert (path / "config.json").read_text() == before
    note = read_metrics(path)[-1]
    assert note == {"kind": "note", "step": 2, "text": "resumed with another configuration: steps: 10 → 20"}


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"holds config\.json, metrics\.jsonl.*resume"):
        RunFolder(path, resume=False)
    assert len(read_metrics(path)) == 3
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigurationError, match=r"expected a run to resume.*thesis\.tex"):
        RunFolder(tmp_path, resume=True)


def test_a_run_that_failed_before_its_first_step_is_no_obstacle(tmp_path: Path) -> None:
    RunFolder(tmp_path, resume=False).close()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json.partial").write_text('{"mod')
    make(tmp_path)
    assert len(read_metrics(tmp_path)) == 3


def test_resume_begins_a_run_where_there_is_none(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "new", resume=True) as folder:
        assert folder.rewind(0) == 0
        folder.append(step(1))
    assert len(read_metrics(tmp_path / "new")) == 1


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([lines[0], "\0\0\0", lines[2], ""]))
    with pytest.raises(GradsyncError, match=r"line 2 of .*metrics\.jsonl.*Delete that line"):
        read_metrics(path)


def test_no_folder_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(GradsyncError, match="Check the path"):
        read_metrics(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(GradsyncError, match="there is a file of that name"):
        RunFolder(tmp_path / "file", resume=False)
    with pytest.raises(ConfigurationError, match="has neither"):
        read_run(tmp_path)


def test_an_unwritable_folder(tmp_path: Path) -> None:
    """Root may write anywhere but into the kernel's own files."""
    path = tmp_path / "locked"
    if os.geteuid() == 0:
        path = Path("/proc/gradsync")
    else:
        path.mkdir(mode=0o500)
    with pytest.raises(GradsyncError, match=f"cannot use {path}"):
        RunFolder(path / "run", resume=False)


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "run"
    written = 0
    with RunFolder(path, resume=False) as folder:
        with pytest.raises(GradsyncError, match=r"metrics\.jsonl.*No space left.*Free some space.*resume"):
            for written in range(1000):
                folder.note(written, "x" * 999)
        with pytest.raises(GradsyncError, match=r"summary\.json.*No space left"):
            folder.write_summary({"text": "x" * 70_000})
    assert written > 10
    assert [record["step"] for record in read_metrics(path)] == list(range(written)), "whole lines only"
    assert (path / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert [entry.name for entry in path.iterdir()] == ["metrics.jsonl"]
