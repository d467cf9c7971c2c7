"""The parts of `gradsync run` that need no script: the clock of phases, what is said, the folder of ranks, imports."""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.base.environment import ProcessEnvironment
from gradsync.errors import ConfigurationError
from gradsync.tools.run.account import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    PHASES,
    REST,
    Account,
    WrapperAccount,
    account_path,
    find_accounts,
    read_account,
    summarize,
    write_account,
)
from gradsync.tools.run.running import is_library
from gradsync.tools.run.script import common_folder
from gradsync.tools.run.startup.sitecustomize import after_import
from gradsync.tools.run.wrappers import PhaseClock


def wrapper(**changes: Any) -> WrapperAccount:
    values: dict[str, Any] = {
        **{"kind": "torch", "model": "Net", "parameters": 88, "nbytes": 352, "buckets": 2},
        **{"steps": 5, "backwards": 20, "synchronized": 20, "wasted": 15, "collectives": 40, "broadcasts": 0},
        **{"backward_with": 0.004, "backward_without": 0.001, "communication": None, "hidden": None},
    }
    return WrapperAccount(**{**values, **changes})


def account(rank: int = 0, *wrappers: WrapperAccount, **changes: Any) -> Account:
    values: dict[str, Any] = {"world_size": 2, "host": "node7", "kept": True, "steps": 5, "called": {}}
    seconds = dict.fromkeys(PHASES, 0.1)
    return Account(**{**values, "rank": rank, "seconds": seconds, "wrappers": wrappers, **changes})


# -- what is said -----------------------------------------------------------------------------------------------------


def test_what_is_wasted_is_told_with_what_it_costs() -> None:
    text = "\n".join(summarize([account(0, wrapper()), account(1, wrapper())], "train.py"))
    assert "8 collectives a step (2 buckets), 4 of 4 backwards synchronized" in text
    assert "WASTED: 75% of them, 6 a step" in text
    # 15 times 3 ms of half a second.
    assert "about 9 ms a step, 9%" in text


def test_a_measured_wire_goes_before_a_comparison() -> None:
    assert wrapper(communication=0.005, hidden=0.003).exposed == pytest.approx(0.002)
    assert wrapper(communication=0.005, hidden=0.006).exposed == 0
    assert wrapper().exposed == pytest.approx(0.003)
    assert wrapper(backward_without=None).exposed is None


def test_ranks_that_left_nothing_are_named() -> None:
    line, *_ = summarize([account(0, wrapper(), world_size=4), account(2, wrapper())], "train.py")
    assert line.startswith("there is no account of rank 1 and rank 3")


def test_a_script_without_a_wrapper_is_one_line() -> None:
    (line,) = summarize([account(called={"all_reduce": 3}), account(1)], "train.py")
    assert "train.py never wrapped a model" in line
    assert "it started 3 collectives itself" in line
    (line,) = summarize([account(world_size=1)], "train.py")
    assert "see --nproc" in line


def test_a_model_that_no_optimizer_knows_is_told() -> None:
    (line,) = summarize([account(0, wrapper(steps=0), steps=0), account(1, wrapper(steps=0), steps=0)], "train.py")
    assert "no optimizer stepped" in line


def test_an_account_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = account(11, wrapper(), wrapper(kind="gradsync"))
    path = write_account(tmp_path / "inner", written)
    write_account(tmp_path / "inner", account(2))
    assert read_account(path) == written
    assert find_accounts(tmp_path / "inner") == [account_path(tmp_path / "inner", rank) for rank in (2, 11)]


# -- the clock --------------------------------------------------------------------------------------------------------


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_phase_counts_its_own_time() -> None:
    hand = Hand()
    clock = PhaseClock(hand)
    with clock.inside(DATA):
        hand.now += 50  # before the first forward
    with clock.inside(FORWARD):
        hand.now += 1
        with clock.inside(DATA):
            hand.now += 2
    hand.now += 4
    with clock.inside(BACKWARD):
        hand.now += 8
    clock.enter(OPTIMIZER)
    hand.now += 16
    clock.leave(OPTIMIZER)
    clock.stepped()
    hand.now += 1000  # after the last step
    assert clock.seconds == {DATA: 2, FORWARD: 1, BACKWARD: 8, OPTIMIZER: 16, REST: 4}


def test_an_error_leaves_the_phase() -> None:
    clock = PhaseClock()
    with pytest.raises(ValueError, match="inside"), clock.inside(BACKWARD):
        raise ValueError("inside")
    assert not clock.is_inside(BACKWARD)


def test_other_threads_are_not_counted() -> None:
    clock = PhaseClock()
    seen: list[bool] = []

    def elsewhere() -> None:
        clock.enter(OPTIMIZER)
        with clock.inside(DATA):
            seen.append(clock.is_mine() or clock.is_inside(DATA) or clock.is_inside(OPTIMIZER))
        clock.leave(OPTIMIZER)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [False]


@given(st.lists(st.tuples(st.sampled_from([*PHASES, None]), st.integers(0, 9))))
def test_phases_add_up_to_all_the_time(walk: list[tuple[str | None, int]]) -> None:
    hand = Hand()
    clock = PhaseClock(hand)
    entered: list[str] = []
    with clock.inside(FORWARD):
        for phase, seconds in walk:
            if phase is not None:
                clock.enter(phase)
                entered.append(phase)
            elif entered:
                clock.leave(entered.pop())
            hand.now += seconds
        clock.stepped()
    assert sum(clock.seconds.values()) == sum(seconds for _, seconds in walk)


# -- the folder of all ranks ------------------------------------------------------------------------------------------


@pytest.fixture
def _own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def place(rank: int) -> ProcessEnvironment:
    return ProcessEnvironment(rank=rank, world_size=2, local_rank=rank, local_world_size=2, launcher="torchrun")


@pytest.mark.usefixtures("_own_temporary")
def test_ranks_meet_in_one_folder_that_goes_with_rank_0(tmp_path: Path) -> None:
    with common_folder(place(0)) as first:
        with common_folder(place(1)) as second:
            assert first == second
            assert first.stat().st_mode & 0o777 == 0o700
        assert first.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_own_temporary")
def test_who_comes_after_rank_0_leaves_nothing(tmp_path: Path) -> None:
    with common_folder(place(1)) as folder:
        with common_folder(place(0)):
            pass
        write_account(folder, account(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_own_temporary")
def test_a_rank_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), common_folder(place(1)):
        raise SystemExit(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_own_temporary")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with common_folder(place(0)) as folder:
        pass
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="--record"), common_folder(place(0)):
        pass
    folder.unlink()
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="--record"), common_folder(place(0)):
        pass


# -- what is a library ------------------------------------------------------------------------------------------------


def _written(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return str(path)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_packages_of_another_python_are_libraries(folder: str, tmp_path: Path) -> None:
    module = _written(tmp_path / "lib" / "python3.9" / folder / "package" / "inner" / "module.py")
    assert is_library(module)
    # A folder that leads there under another name; and one there that leads elsewhere.
    (tmp_path / "modules").symlink_to(tmp_path / "lib" / "python3.9" / folder)
    assert is_library(str(tmp_path / "modules" / "package" / "inner" / "module.py"))
    (tmp_path / "lib" / "python3.9" / folder / "linked.py").symlink_to(_written(tmp_path / "cache" / "linked.py"))
    assert is_library(str(tmp_path / "lib" / "python3.9" / folder / "linked.py"))


def test_what_pip_has_put_into_a_folder_of_the_path_is_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _written(tmp_path / "target" / "package-1.0.dist-info" / "RECORD")
    monkeypatch.syspath_prepend(str(tmp_path / "target"))
    assert is_library(_written(tmp_path / "target" / "package" / "module.py"))


def test_what_a_user_has_written_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is installed from where it lies, beside what setuptools leaves there."""
    _written(tmp_path / "project" / "src" / "project.egg-info" / "PKG-INFO")
    monkeypatch.syspath_prepend(str(tmp_path / "project" / "src"))
    assert not is_library(_written(tmp_path / "project" / "src" / "project" / "train.py"))
    assert not is_library(_written(tmp_path / "site-packages.py"))
    assert not is_library("<string>")


# -- after an import --------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "imported_later.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "imported_later"
    sys.modules.pop("imported_later", None)


def test_a_module_is_acted_on_once_when_it_is_imported(module: str) -> None:
    seen: list[ModuleType] = []
    after_import(module, seen.append)
    # Whether it could be imported is asked without importing it.
    assert importlib.util.find_spec(module) is not None
    assert seen == []
    assert importlib.import_module(module).value == 1
    importlib.reload(sys.modules[module])
    assert seen == [sys.modules[module]]
    after_import(module, seen.append)
    assert len(seen) == 2


def test_a_module_that_is_not_there_stays_so() -> None:
    after_import("nowhere_at_all", lambda module: pytest.fail("imported"))
    try:
        with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
            importlib.import_module("nowhere_at_all")
    finally:
        sys.meta_path.pop(0)
