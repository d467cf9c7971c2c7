"""The example scripts run, all ranks end with the same parameters, and each is five lines from the single process."""

import difflib
import re
from pathlib import Path

import pytest

from tests.scripts import run_scripts

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RECIPE = "train_gpt"
# Of what to add to gradsync, not of how to train with it; see test_samples.
SAMPLES = ("own_communicator", "stateful_reduction")
OTHERS = ("single_process", RECIPE, *SAMPLES)
DERIVED = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in OTHERS)


def code(name: str) -> list[str]:
    """The lines of a script without its docstring, blank lines and indentation."""
    text = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


def changed(name: str) -> list[str]:
    """What a reader has to rewrite. A line that is only dropped, or moved to the right, is not."""
    difference = difflib.ndiff(code("single_process"), code(name))
    return [line[2:] for line in difference if line.startswith("+ ")]


def torchrun(names: list[str], ranks: int, folder: Path) -> dict[str, str]:
    """What each script printed on all ranks; 0 ranks: a plain process."""
    paths = {name: EXAMPLES / f"{name}.py" for name in names}
    results = run_scripts(list(paths.values()), ranks=ranks, folder=folder)
    for name, path in paths.items():
        assert results[path].error is None, f"{name}: {results[path].error}"
    return {name: results[path].output for name, path in paths.items()}


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", output)]


def sums(output: str) -> list[str]:
    return re.findall(r"parameters sum to (-?[\d.]+)", output)


def test_there_is_one_for_every_loop() -> None:
    assert DERIVED == [
        "accelerator_accumulate",
        "accelerator_no_sync",
        "ddp_no_sync",
        "naive_averaging",
        "subgroup_averaging",
    ]


@pytest.mark.parametrize("name", DERIVED)
def test_at_most_five_lines_change(name: str) -> None:
    lines = changed(name)
    assert 0 < len(lines) <= 5, lines


def test_readme_shows_the_difference() -> None:
    """Line by line what the example has and the single process has not."""
    readme = (ROOT / "README.md").read_text()
    shown = [line[1:].strip() for line in readme.splitlines() if line.startswith("+")]
    assert shown == changed("accelerator_accumulate")


@pytest.mark.program
@pytest.mark.timeout(120)
def test_two_ranks_train_one_model(tmp_path: Path) -> None:
    names = [name for name in DERIVED if name != "subgroup_averaging"]
    for name, output in torchrun(names, 2, tmp_path).items():
        # The output of one rank comes after that of the other.
        first, second = losses(output)[:8], losses(output)[8:]
        assert len(first) == len(second) == 8, name
        assert first[-1] + second[-1] < 0.7 * (first[0] + second[0]), name
        assert len(sums(output)) == 2
        assert len(set(sums(output))) == 1, name


@pytest.mark.program
@pytest.mark.timeout(120)
def test_two_groups_train_two_models(tmp_path: Path) -> None:
    output = torchrun(["subgroup_averaging"], 4, tmp_path)["subgroup_averaging"]
    assert len(sums(output)) == 4
    assert sorted(sums(output).count(each) for each in set(sums(output))) == [2, 2]


@pytest.mark.program
@pytest.mark.timeout(120)
def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    outputs = torchrun(["single_process", "accelerator_accumulate", "accelerator_no_sync"], 0, tmp_path)
    for name, output in outputs.items():
        assert losses(output)[-1] < 0.5 * losses(output)[0], name
        assert sums(output) == sums(outputs["single_process"]), name


@pytest.mark.program
@pytest.mark.timeout(120)
def test_the_samples_train(tmp_path: Path) -> None:
    outputs = torchrun(list(SAMPLES), ranks=2, folder=tmp_path)
    for name in SAMPLES:
        seen = losses(outputs[name])
        assert seen[-1] < seen[0], name
    assert len(set(sums(outputs["stateful_reduction"]))) == 1
    pairs = re.findall(r"loss ([\d.]+), with average_gradients ([\d.]+)", outputs["own_communicator"])
    assert len(pairs) >= 20
    assert all(ours == theirs for ours, theirs in pairs)


@pytest.mark.program
def test_the_recipe_trains_and_goes_on(tmp_path: Path) -> None:
    assert len((EXAMPLES / f"{RECIPE}.py").read_text().splitlines()) < 120
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 2000)
    options = ["--model", "nano", "--length", "32", "--batch", "2", "--data", str(tmp_path / "text.txt")]
    options += ["--checkpoints", str(tmp_path / "checkpoints")]

    def run(steps: int) -> str:
        script = EXAMPLES / f"{RECIPE}.py"
        ran = run_scripts([script], ranks=2, folder=tmp_path, arguments=[*options, "--steps", str(steps)])[script]
        assert ran.error is None, ran.error
        return ran.output

    first = run(20)
    assert "goes on" not in first
    second = run(40)
    assert "goes on after step 20" in second
    assert losses(second)[-1] < losses(first)[0]
