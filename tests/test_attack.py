"""The attack finds what is wrong, and says how to see it again."""

import dataclasses
from collections.abc import Iterator

import pytest

from tests import attack
from tests.attack_check import check, train_alone
from tests.attack_disturbances import Outcome, Snapshot
from tests.attack_mutants import MUTANTS
from tests.attack_programs import Program, draw
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

# Two ranks each, which the tests have anyway: threads that read, handlers and interrupts beside each kind of optimizer.
SEEDS = {"plain": 15, "sharded": 3, "overlapped": 12}


@pytest.fixture
def attacker() -> Iterator[attack.Attacker]:
    with attack.Attacker() as attacker:
        attacker._pools[2] = pool_of(2)
        yield attacker
        # The pool is everybody's.
        attacker._pools.clear()


def test_a_program_is_drawn_from_its_seed_alone() -> None:
    assert draw(7) == draw(7)
    programs = [draw(seed) for seed in range(200)]
    assert {program.optimizer.kind for program in programs} == {"plain", "sharded", "overlapped"}
    ends = {program.end.kind for program in programs if program.end is not None}
    assert ends == {"interrupt", "interrupt all", "step raises", "killed"}
    shots = {(shot.kind, shot.by) for program in programs for window in program.windows for shot in window.shots}
    assert shots == {(kind, by) for kind in ("handler", "interrupt") for by in ("signal", "bytecode")}
    assert any(program.optimizer.late for program in programs)
    assert any(window.closure for program in programs for window in program.windows)


@pytest.mark.parametrize("kind", SEEDS)
def test_programs_of_fixed_seeds_are_clean(kind: str, attacker: attack.Attacker) -> None:
    program = draw(SEEDS[kind])
    assert (program.optimizer.kind, program.world_size, program.end) == (kind, 2, None)
    assert attacker.run(program) == [], str(program)


def outcome_of(program: Program) -> Outcome:
    """What a rank would say that did everything right."""
    expected = train_alone(program)
    snapshots = [Snapshot("read", state, whole=True) for state in expected.states]
    return Outcome(snapshots=snapshots, final=expected.states[-1], states=expected.optimizers)


def test_what_is_off_is_said() -> None:
    program = draw(SEEDS["overlapped"])
    well = outcome_of(program)
    first, *_, last = (snapshot.values for snapshot in well.snapshots)
    assert check(program, [well, well]) == []

    def found(**changes: object) -> str:
        return "\n".join(check(program, [well, dataclasses.replace(well, **changes)]))

    mixed = Snapshot("handler", [first[0], *last[1:]], whole=True)
    assert "a mixture of steps" in found(snapshots=[mixed])
    assert found(snapshots=[dataclasses.replace(mixed, whole=False)]) == ""
    between = Snapshot("handler", [(a + b) / 2 for a, b in zip(first, last, strict=True)], whole=False)
    assert "those after no step" in found(snapshots=[between])
    bits = Snapshot("save", [values * (1 + 1e-15) for values in last], whole=True)
    assert "differs in bits" in found(snapshots=[bits])
    assert "ends off by" in found(final=[values + 1e-6 for values in last])
    assert "did not come to its end" in found(final=None)
    assert "raised" in found(wrong=["handler raised IndexError()"])


def test_a_repair_that_is_taken_out_is_found(attacker: attack.Attacker, capsys: pytest.CaptureFixture[str]) -> None:
    """One that no moment decides on: the others are for --mutants."""
    seed = next(seed for seed in range(500) if _adds_a_group(draw(seed)))
    wrong = attacker.run(draw(seed), "added-groups")
    assert any("has groups of" in line for line in wrong), wrong
    assert attack._again(seed, "added-groups") == f"make attack ARGS='--seed {seed} --without added-groups'"


def _adds_a_group(program: Program) -> bool:
    made = program.optimizer
    return (made.kind, program.world_size, program.end) == ("overlapped", 2, None) and bool(made.late)


def test_help_names_all_repairs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attack.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert all(name in told for name in MUTANTS)
