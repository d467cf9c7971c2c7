"""`gradsync run`: scripts that know nothing of gradsync, in real processes, and what is said of them."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.errors import ConfigurationError
from gradsync.tools.run.account import Account, find_accounts, read_account
from tests.scripts import free_port, in_new_interpreters, run_scripts
from tests.zygote import fork, run_python

# One worker runs them all: they take their time from the same two cores.
pytestmark = [pytest.mark.program, pytest.mark.timeout(150), pytest.mark.xdist_group("run")]

UNCHANGED = Path(__file__).parents[2] / "examples" / "unchanged"

# Four micro-batches a window, of which it forgets to say that three need not synchronize.
FORGETFUL = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backward_alone = "backward-alone" in sys.argv
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    for micro_batch in range(4):
        loss = model(torch.full((4, 8), float(micro_batch + dist.get_rank()))).square().mean()
        if backward_alone and micro_batch < 3:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
dist.destroy_process_group()
"""


def gradsync_run(
    *arguments: str, folder: Path, keep: bool = False, code: int = 0, **options: Any
) -> "subprocess.CompletedProcess[str]":
    told = run_python("-m", "gradsync", "run", *(["--keep"] if keep else []), *arguments, folder=folder, **options)
    assert told.returncode == code, told.stderr
    return told


def recorded(
    script: str, *words: str, folder: Path, keep: bool
) -> tuple["subprocess.CompletedProcess[str]", list[Account]]:
    """A script on two ranks, and their accounts."""
    told = gradsync_run("--nproc", "2", "--record", "record", script, *words, folder=folder, keep=keep)
    return told, accounts(folder / "record")


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def accounts(folder: Path) -> list[Account]:
    return [read_account(path) for path in find_accounts(folder)]


def parameters(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path)["model"]
    return found


# -- unchanged scripts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "steps", "backwards"),
    [
        ("gpt_loop", ["--dtype=float64", "--max_iters=6", "--out={}"], 6, 12),
        ("ddp_basics", ["--epochs", "2", "--out", "{}"], 20, 20),
        ("accelerate_accumulation", ["--epochs", "1", "--out", "{}"], 4, 16),
    ],
)
def test_scripts_train_to_the_bits_they_train_to_by_themselves(
    name: str, options: list[str], steps: int, backwards: int, tmp_path: Path
) -> None:
    script = UNCHANGED / f"{name}.py"
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    ran = run_scripts(
        [script], ranks=2, folder=tmp_path, arguments=[each.format(before) for each in options], timeout=120
    )[script]
    assert ran.error is None
    arguments = [each.format(after) for each in options]
    told = gradsync_run("--nproc", "2", "--record", "record", str(script), *arguments, folder=tmp_path, timeout=120)
    assert sorted(told.stdout.split()) == sorted(ran.output.split())
    ours, theirs = parameters(after), parameters(before)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[each], theirs[each]) for each in theirs)
    for account in accounts(tmp_path / "record"):
        assert account.steps == steps
        (wrapper,) = account.wrappers
        assert (wrapper.kind, wrapper.backwards, wrapper.synchronized, wrapper.wasted) == (
            "gradsync",
            backwards,
            steps,
            0,
        )
    assert f"{steps} optimizer steps on 2 ranks" in told.stderr
    assert "none of them was wasted" in told.stderr


@pytest.mark.parametrize(
    ("keep", "words"), [(True, ["backward-alone"]), (True, []), (False, []), (False, ["backward-alone"])]
)
def test_a_forgotten_no_sync_is_counted(keep: bool, words: list[str], tmp_path: Path) -> None:
    """Around the backward alone it is forgotten by torch's class, and understood by gradsync's."""
    script = write(tmp_path, FORGETFUL)
    told, found = recorded(str(script), *words, folder=tmp_path, keep=keep)
    synchronized = 1 if words and not keep else 4
    assert [account.rank for account in found] == [0, 1]
    for account in found:
        assert (account.kept, account.steps, account.called) == (keep, 5, {"all_reduce": 5})
        (wrapper,) = account.wrappers
        assert wrapper.kind == ("torch" if keep else "gradsync")
        assert (wrapper.backwards, wrapper.synchronized, wrapper.wasted) == (
            20, 5 * synchronized, 5 * (synchronized - 1),
        )  # fmt: skip
        assert wrapper.collectives == wrapper.synchronized * wrapper.buckets
        assert wrapper.broadcasts == 20
        assert account.total == pytest.approx(sum(account.seconds.values()))
    if synchronized == 4:
        assert "WASTED: 75% of them, 3 a step" in told.stderr
        assert "model.no_sync()" in told.stderr
    else:
        assert "none of them was wasted" in told.stderr


# Each of its backwards is needed: some inside of a step, the others followed by gradients that are thrown away.
NEEDED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)

def closure():
    optimizer.zero_grad()
    loss = (model(torch.eye(8)) - torch.arange(8.0)[:, None]).square().mean()
    loss.backward()
    return loss

for step in range(2):
    for _ in range(2):
        closure()
    optimizer.zero_grad()
    optimizer.step(closure)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("keep", [False, True])
def test_what_was_needed_is_not_called_wasted(keep: bool, tmp_path: Path) -> None:
    write(tmp_path, NEEDED)
    for account in recorded("script.py", folder=tmp_path, keep=keep)[1]:
        (wrapper,) = account.wrappers
        assert account.steps == wrapper.steps == 2
        assert wrapper.backwards == wrapper.synchronized >= 8
        assert wrapper.wasted == 0


# Two models with an optimizer each; one has backwards while the other has had a forward that gets none.
ADVERSARIES = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
maker, critic = DistributedDataParallel(torch.nn.Linear(4, 4)), DistributedDataParallel(torch.nn.Linear(4, 1))
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (maker, critic)]
for step in range(3):
    noise = torch.ones(2, 4)
    optimizers[1].zero_grad()
    critic(maker(noise).detach()).mean().backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    with critic.no_sync():
        critic(maker(noise)).mean().backward()
    optimizers[0].step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("keep", [False, True])
def test_models_are_told_apart(keep: bool, tmp_path: Path) -> None:
    write(tmp_path, ADVERSARIES)
    for account in recorded("script.py", folder=tmp_path, keep=keep)[1]:
        maker, critic = account.wrappers
        assert account.steps == 6
        assert (maker.steps, maker.backwards, maker.synchronized, maker.collectives) == (3, 3, 3, 3)
        # Of its last window there is no end.
        assert (critic.steps, critic.backwards, critic.synchronized, critic.wasted) == (3, 5, 3, 0)


def test_ranks_that_start_ranks_are_told_of(tmp_path: Path) -> None:
    # Without the processes themselves, whose imports take half a minute.
    write(
        tmp_path,
        "import sys\nimport torch.multiprocessing as mp\n"
        "sys.modules[mp.spawn.__module__].start_processes = lambda *a, **b: print(*a)\nmp.spawn(len, nprocs=2)",
    )
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    told = gradsync_run("script.py", folder=tmp_path, variables=variables)
    assert "in each of 1 ranks. If these are to be its ranks: gradsync run --nproc 0" in told.stderr
    assert told.stdout.startswith("<built-in function len> () 2 True")


def test_a_folder_that_holds_a_recording_is_not_written_over(tmp_path: Path) -> None:
    script = write(tmp_path, FORGETFUL)
    recorded(str(script), folder=tmp_path, keep=False)
    told = gradsync_run("--nproc", "1", "--record", "record", str(script), folder=tmp_path, code=2)
    assert "holds the recording of another run" in told.stderr


def test_under_another_launcher_rank_0_speaks_of_all(tmp_path: Path) -> None:
    write(tmp_path, FORGETFUL)
    main = Path(sys.modules["gradsync"].__file__ or "").parent / "__main__.py"
    ran = run_scripts([main], ranks=2, folder=tmp_path, arguments=["run", "--record", "record", "script.py"])[main]
    assert ran.error is None
    assert len(accounts(tmp_path / "record")) == 2


def test_a_script_may_start_its_ranks(tmp_path: Path) -> None:
    """They import the script again, and must not find torch's class in doing so."""
    command = ["--nproc", "0", "--record", "record", str(UNCHANGED / "ddp_basics.py"), "--spawn", "2", "--epochs", "1"]
    # A process that is spawned is a fresh interpreter, however it is started.
    variables = {**os.environ, "MASTER_PORT": str(free_port()), "MASTER_ADDR": "localhost"}
    told = gradsync_run(*command, folder=tmp_path, variables=variables, timeout=120)
    found = accounts(tmp_path / "record")
    assert [(account.rank, account.world_size, account.wrappers[0].kind) for account in found] == [
        (0, 2, "gradsync"), (1, 2, "gradsync"),
    ]  # fmt: skip
    assert "10 optimizer steps on 2 ranks" in told.stderr
    assert len(list((tmp_path / "record").glob("rank-*.jsonl"))) == 2


# -- a script is as Python would run it -------------------------------------------------------------------------------

INSIDE = """
import json, os, pickle, sys
import beside
from torch.nn import parallel
from torch.nn.parallel import distributed

class Here: pass

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Here())).__class__ is Here
    assert parallel.DistributedDataParallel is distributed.DistributedDataParallel
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "file": __file__, "package": __package__, "beside": beside.name,
        "class": parallel.DistributedDataParallel.__module__, "ranks": os.environ.get("WORLD_SIZE"),
    }))
"""


@pytest.mark.parametrize("keep", [False, True])
def test_a_script_finds_what_it_would_find(keep: bool, tmp_path: Path) -> None:
    script = write(tmp_path / "inner", INSIDE)
    write(tmp_path / "inner", "name = 'a file beside'", "beside.py")
    # What looks like our options comes after the script, and is the script's.
    words = ["--nproc", "7", "--keep", "-m", "--", "--record", "x", "--help"]
    told = gradsync_run("--nproc", "1", "inner/script.py", *words, folder=tmp_path, keep=keep)
    found = json.loads(told.stdout)
    assert found["argv"] == ["inner/script.py", *words]
    assert (found["path"], found["file"]) == (str(script.parent), str(script))
    assert (found["package"], found["beside"], found["ranks"]) == (None, "a file beside", "1")
    assert found["class"] == ("torch.nn.parallel.distributed" if keep else "gradsync.parallel.data_parallel")
    assert told.stderr.count("inner/script.py never wrapped a model") == 1
    assert len(told.stderr.splitlines()) == 1


def test_a_module_is_run_by_its_name(tmp_path: Path) -> None:
    write(tmp_path / "package", "", "__init__.py")
    write(tmp_path / "package", "name = 'in the package'", "other.py")
    text = "import sys\nfrom .other import name\nprint(name, __package__, __spec__.name, *sys.argv[1:])"
    write(tmp_path / "package", text, "__main__.py")
    told = gradsync_run("--nproc", "1", "-m", "package", "--keep", folder=tmp_path)
    assert told.stdout == "in the package package package.__main__ --keep\n", told.stderr


FAILING = """
import sys
import torch.distributed as dist

def fails():
    raise ValueError("its own words")

class Odd(Exception): pass

dist.init_process_group("gloo")
if "exit" in sys.argv:
    sys.exit(3)
if "words" in sys.argv:
    sys.exit("said at the end")
if dist.get_rank() == 1:
    fails()
dist.barrier()
"""


def test_a_script_that_fails_has_the_last_word(tmp_path: Path) -> None:
    write(tmp_path, FAILING)
    told = gradsync_run("--nproc", "2", "script.py", folder=tmp_path, code=1)
    assert "ValueError: its own words" in told.stderr
    assert 'script.py", line 6, in fails' in told.stderr
    # Nothing of ours in between, neither above the script nor where collectives are counted.
    assert "gradsync/running" not in told.stderr
    assert "never wrapped" not in told.stderr
    # The rank that failed first, and a line for the other one.
    assert told.stderr.count("Traceback") == 1, told.stderr
    assert "gradsync: rank 1 failed first:" in told.stderr


TRAINED = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
if "hook" in sys.argv:
    sys.excepthook = lambda kind, error, trace: print("hooked:", error)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 5 and dist.get_rank() == 1:
        raise ValueError("its own words")
"""


def test_other_ranks_know_why_a_rank_has_failed_and_nothing_is_explained(tmp_path: Path) -> None:
    write(tmp_path, TRAINED)
    told = gradsync_run("--nproc", "2", "script.py", folder=tmp_path, code=1)
    assert told.stderr.count("Traceback") == 1, told.stderr
    assert re.search(
        r"rank 0 then raised CommunicatorLostError: rank 1 .* raised ValueError: its own words", told.stderr
    )
    assert "a step takes" not in told.stderr
    hooked = gradsync_run("--nproc", "2", "script.py", "hook", folder=tmp_path, code=1)
    assert hooked.stdout.count("hooked: ") == 2, hooked.stderr


def test_a_script_that_is_no_python_says_so(tmp_path: Path) -> None:
    script = write(tmp_path, "x = 1\nif True print(x)\n")
    told = gradsync_run("--nproc", "1", "script.py", folder=tmp_path, code=1)
    assert told.stderr.startswith(f'  File "{script}", line 2\n')
    assert "SyntaxError" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(("word", "code"), [("exit", 3), ("words", 1)])
def test_exit_codes_are_the_scripts(word: str, code: int, tmp_path: Path) -> None:
    write(tmp_path, FAILING)
    told = gradsync_run("--nproc", "1", "script.py", word, folder=tmp_path, code=code)
    assert ("said at the end" in told.stderr) == (word == "words")
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["."], "is a folder"),
        (["-m", "nowhere_at_all"], "there is no module nowhere_at_all"),
        (["--nproc", "-1", "script.py"], "--nproc must be at least 0, got -1"),
        (["--record", "script.py", "script.py"], "--record script.py cannot be made a folder"),
        (["--wings", "script.py"], "No such option: --wings"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    write(tmp_path, "print('ran')")
    told = gradsync_run(*arguments, folder=tmp_path, code=2)
    assert words in re.sub(r"[\s│]+", " ", told.stderr)
    assert "ran" not in told.stdout


def test_the_number_of_ranks_is_the_launchers(tmp_path: Path) -> None:
    write(tmp_path, "print('ran')")
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    told = gradsync_run("--nproc", "2", "script.py", folder=tmp_path, variables=variables, code=2)
    assert "Leave their number to it" in told.stderr


SLEEPING = FORGETFUL.replace(
    "dist.destroy", "open('trained-' + str(dist.get_rank()), 'w').close()\nimport time\ntime.sleep(60)\ndist.destroy"
)


def test_ctrl_c_ends_it_with_an_account(tmp_path: Path) -> None:
    write(tmp_path, SLEEPING)
    with tempfile.TemporaryFile("w+") as output:
        command = ["-m", "gradsync", "run", "--nproc", "2", "script.py"]
        process = fork("tests.nursery:as_python", command, output=output, folder=tmp_path)
        try:
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("trained-*"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        finally:
            process.kill_all()
        output.seek(0)
        wrote = output.read()
    assert code == 130, wrote
    assert "5 optimizer steps on 2 ranks" in wrote


# -- ranks that a script starts by subprocess -------------------------------------------------------------------------

# A launcher of its own, that starts its ranks from a shell; and the rank.
STARTING = """
import os, subprocess, sys
for rank in range(2):
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    command = f"{sys.executable} {' '.join(sys.argv[2 + rank].split(','))} rank.py"
    ranks = globals().setdefault("ranks", [])
    ranks.append(subprocess.Popen(command, shell=True, env=os.environ | variables))
sys.exit(max(each.wait() for each in ranks))
"""
STARTED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(dist.get_rank(), type(model).__module__, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("keep", [False, True])
def test_ranks_that_a_shell_starts_have_the_class_and_their_own_customization(keep: bool, tmp_path: Path) -> None:
    write(tmp_path, STARTING)
    write(tmp_path, STARTED, "rank.py")
    write(tmp_path, "print('customized', flush=True)", "own/sitecustomize.py")
    options = ["--keep"] if keep else []
    command = ["--nproc", "0", *options, "script.py", str(free_port()), "-u", "-u"]
    told = in_new_interpreters(*command, folder=tmp_path, PYTHONPATH=str(tmp_path / "own"))
    assert told.returncode == 0, told.stderr
    # Of this process, of the two ranks, and of no shell.
    assert told.stdout.count("customized") == 3
    expected = "torch.nn.parallel.distributed" if keep else "gradsync.parallel.data_parallel"
    assert told.stdout.count(expected) == 2
    assert "3 optimizer steps on 2 ranks" in told.stderr


def test_ranks_of_a_fork_server_are_counted(tmp_path: Path) -> None:
    text = f"""
import os
import torch.multiprocessing as mp

def be_rank(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port()}")
{textwrap.indent(STARTED, "    ")}

if __name__ == "__main__":
    mp.start_processes(be_rank, nprocs=2, start_method="forkserver")
"""
    write(tmp_path, text)
    gradsync_run("--nproc", "0", "--record", "record", "script.py", folder=tmp_path)
    assert [account.steps for account in accounts(tmp_path / "record")] == [3, 3]


def test_ranks_of_which_one_has_torchs_class_are_told_so(tmp_path: Path) -> None:
    """A Python that ignores its environment cannot be reached."""
    write(tmp_path, STARTING)
    write(tmp_path, STARTED, "rank.py")
    told = in_new_interpreters("--nproc", "0", "script.py", str(free_port()), "-u", "-E", folder=tmp_path)
    assert told.returncode != 0
    assert "rank 0 wraps its model in gradsync's DistributedDataParallel, and rank 1 in torch's" in told.stderr
    assert "use the same class on all ranks" in told.stderr
    assert "without overflow" not in told.stderr


# -- whom Accelerate's name means what --------------------------------------------------------------------------------

ACCELERATES = """
import importlib.util, sys
assert importlib.util.find_spec("accelerate") is not None
import accelerate
import accelerate.accelerator
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

print(Accelerator.__module__, accelerate.Accelerator.__module__, accelerate.accelerator.Accelerator.__module__)
import accelerate.launchers
looked_up = eval("lambda: accelerate.Accelerator", {"accelerate": accelerate})
installed = compile("from accelerate import Accelerator as found", accelerate.launchers.__file__, "exec")
exec(installed)
print(found.__module__)
accelerate.Accelerator = int
print(accelerate.Accelerator)
"""


def test_installed_libraries_have_accelerates_own_class(tmp_path: Path) -> None:
    write(tmp_path, ACCELERATES)
    told = gradsync_run("--nproc", "1", "script.py", folder=tmp_path)
    ours = "gradsync.accelerator.accelerator"
    assert told.stdout.splitlines() == [" ".join([ours] * 3), "accelerate.accelerator", "<class 'int'>"]


def test_another_version_of_an_account_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"version": 99}), "run-rank-0.json")
    with pytest.raises(ConfigurationError, match="another version of gradsync"):
        read_account(path)
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_account(path)
