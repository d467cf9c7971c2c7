"""Every check of the doctor on a machine that lacks something, and the command with real ranks."""

import importlib.metadata
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from gradsync.tools import doctor
from gradsync.tools.cli import doctor as command
from gradsync.tools.cli.main import app
from gradsync.tools.doctor import checks, network
from gradsync.tools.doctor.checks import GIB, MIB, Finding, Status, guarded
from gradsync.tools.doctor.network import Interface
from tests.zygote import run_python

pytestmark = pytest.mark.timeout(120)

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
TWO_NODES = TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head"}


def expect(finding: Finding, status: Status, detail: str, fix: str = "") -> None:
    assert finding.status is status, finding
    assert detail in finding.detail
    if status is PASS:
        assert finding.fix == ""
    else:
        assert fix
        assert fix in finding.fix


# -- what is installed ------------------------------------------------------------------------------------------------


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    expect(checks.check_python(), PASS, f"3.{sys.version_info[1]}.")
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    expect(checks.check_python(), FAIL, "", "Python 3.11")


@pytest.mark.parametrize(("version", "status"), [("2.9.1+cu128", FAIL), ("2.10.0a0+git1", PASS), ("3.0.0", PASS)])
def test_torch(version: str, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    expect(checks.check_torch(), status, version, "pip install 'torch>=2.10'")


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gloo", "nccl", "mpi", "ucc"):
        monkeypatch.setattr(dist, f"is_{name}_available", lambda name=name: name in ("gloo", "mpi"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expect(checks.check_backends(), PASS, "gloo, mpi; not in this torch: nccl, ucc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    expect(checks.check_backends(), WARN, "gloo, mpi", "a torch with NCCL")
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    expect(checks.check_backends(), FAIL, "mpi; not in this torch: gloo", "a torch with Gloo")
    monkeypatch.setattr(dist, "is_available", lambda: False)
    expect(checks.check_backends(), FAIL, "without torch.distributed", "install a torch")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks, "NVIDIA_DEVICE", tmp_path / "none")
    expect(checks.check_gpus(), PASS, "none")
    # A driver, and a torch without CUDA; then one with it.
    monkeypatch.setattr(checks, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    expect(checks.check_gpus(), WARN, "built for CPUs only", "a torch with CUDA")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    expect(checks.check_gpus(), FAIL, "finds no GPU", "nvidia-smi")


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus = [SimpleNamespace(name="NVIDIA H200", total_memory=139 * GIB)] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    driver = tmp_path / "version"
    driver.write_text("570.1\n")
    monkeypatch.setattr(checks, "NVIDIA_DRIVER", driver)
    expect(checks.check_gpus(), PASS, "2 × NVIDIA H200 (139 GiB); CUDA 12.8, driver 570.1")
    gpus.append(SimpleNamespace(name="NVIDIA T4", total_memory=16 * GIB))
    expect(checks.check_gpus(), WARN, "1 × NVIDIA T4 (16 GiB)", "CUDA_VISIBLE_DEVICES")


def test_launcher() -> None:
    expect(checks.check_launcher({}), PASS, "none")
    expect(checks.check_launcher(TORCHRUN), PASS, "torchrun: rank 0 of 4, on one node")
    expect(checks.check_launcher(TWO_NODES), PASS, "several nodes")
    secret = {"RANK": "0", "WORLD_SIZE": "the-secret-host"}
    finding = checks.check_launcher(secret)
    expect(finding, FAIL, "the-secret-host", "env | grep")
    assert "secret" not in finding.public_detail


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("safetensors", "accelerate"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(importlib.metadata, "version", version)
    expected = "typer 1.2, rich 1.2, transformers 1.2; not installed: safetensors, accelerate"
    expect(checks.check_packages(), PASS, expected)


# -- what the machine gives -------------------------------------------------------------------------------------------


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Pretends to be a machine with so many cores, and a container with such a limit."""
    monkeypatch.setattr(checks, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)

    def pretend(usable: int, limit: str = "max 100000") -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)))
        (tmp_path / "cpu.max").write_text(limit)

    return pretend


def test_cores(cores: Callable[..., None]) -> None:
    cores(8)
    expect(checks.check_cores({}), PASS, "8 usable; OMP_NUM_THREADS not set")
    expect(checks.check_cores({"OMP_NUM_THREADS": "8"}), PASS, "OMP_NUM_THREADS 8")
    expect(checks.check_cores({"OMP_NUM_THREADS": "16"}), WARN, "1 rank × 16 threads", "OMP_NUM_THREADS=8")
    expect(checks.check_cores({"OMP_NUM_THREADS": "many"}), WARN, "no number", "OMP_NUM_THREADS=1")
    expect(checks.check_cores(TORCHRUN), WARN, "4 ranks × 8 threads", "OMP_NUM_THREADS=2")
    expect(checks.check_cores(TORCHRUN | {"OMP_NUM_THREADS": "2"}), PASS, "8 usable")
    cores(2)
    expect(checks.check_cores(TORCHRUN | {"OMP_NUM_THREADS": "1"}), WARN, "2 usable of 8", "at most 2 ranks")
    cores(1)
    expect(checks.check_cores({}), WARN, "1 usable of 8", "take turns")
    cores(8, "150000 100000")
    expect(checks.check_cores({}), WARN, "1 usable of 8 (a container's limit: 1.5)", "docker --cpus")


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(checks, "MEMINFO", meminfo)
    monkeypatch.setattr(checks, "CGROUP", tmp_path)
    meminfo.write_text(f"MemTotal:  {16 * MIB} kB\nMemFree: 3 kB\nMemAvailable:  {8 * MIB} kB\n")
    expect(checks.check_memory(), PASS, "8 GiB available of 16 GiB")
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    expect(checks.check_memory(), WARN, "1 GiB available of 4 GiB", "container's limit")
    (tmp_path / "memory.max").write_text("max\n")
    meminfo.write_text(f"MemTotal:  {16 * MIB} kB\nMemAvailable:  {MIB} kB\n")
    expect(checks.check_memory(), WARN, "1 GiB available of 16 GiB", "end what fills")


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stats = SimpleNamespace(f_blocks=2 * MIB, f_bavail=2 * MIB, f_frsize=1024)
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: stats)
    expect(checks.check_shared_memory(), PASS, "2 GiB free of 2 GiB")
    stats.f_bavail = 64 * 1024
    expect(checks.check_shared_memory(), WARN, "64 MiB free", "--shm-size")
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path / "none")
    expect(checks.check_shared_memory(), FAIL, "does not exist", "mount -t tmpfs")


@pytest.mark.parametrize(("limit", "status"), [(1024, PASS), (-1, PASS), (1023, WARN), (127, FAIL)])
def test_open_files(limit: int, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, -1))
    expect(checks.check_open_files(), status, "unlimited" if limit < 0 else str(limit), "ulimit -n")
    if status is not PASS:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
        expect(checks.check_open_files(), status, f"{limit} a process", "hard limit")


# -- the network ------------------------------------------------------------------------------------------------------

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"), up=True, megabits=None)
ETH0 = Interface(name="eth0", addresses=("192.0.2.7", "fe80::1"), up=True, megabits=10_000)
IB0 = Interface(name="ib0", addresses=("198.51.100.7",), up=True, megabits=200_000)


def test_interfaces() -> None:
    finding = network.check_interfaces((LO, ETH0))
    expect(finding, PASS, "eth0 up 10 Gb/s 192.0.2.7, fe80::1")
    assert finding.public_detail == "lo up; eth0 up 10 Gb/s"
    expect(network.check_interfaces((LO,)), WARN, "lo up", "beside loopback")
    link_local = Interface(name="eth0", addresses=("fe80::1",), up=True, megabits=None)
    expect(network.check_interfaces((LO, link_local)), WARN, "eth0 up", "beside loopback")
    down = Interface(name="lo", addresses=("127.0.0.1",), up=False, megabits=None)
    expect(network.check_interfaces((down, ETH0)), FAIL, "lo down", "ip link set lo up")
    expect(network.check_interfaces(()), FAIL, "none", "ip link set lo up")


def test_this_machines_interfaces() -> None:
    found = {interface.name: interface for interface in network.list_interfaces()}
    assert "127.0.0.1" in found["lo"].addresses
    assert found["lo"].up
    assert found["lo"].is_loopback
    assert not any(interface.is_loopback for name, interface in found.items() if name != "lo")


@pytest.mark.parametrize(
    ("resolves_to", "variables", "status", "detail", "fix"),
    [
        (["192.0.2.7"], {}, PASS, "Gloo will use eth0", ""),
        (["127.0.1.1"], {}, WARN, "stands for a loopback address", "GLOO_SOCKET_IFNAME=ib0"),
        (["127.0.0.1"], TWO_NODES, FAIL, "stands for a loopback address", "GLOO_SOCKET_IFNAME=ib0"),
        (["203.0.113.9"], {}, WARN, "not on this machine", "GLOO_SOCKET_IFNAME=ib0"),
        (["203.0.113.9"], TWO_NODES, FAIL, "not on this machine", "cannot reach that"),
        ([], {}, WARN, "stands for no address", "GLOO_SOCKET_IFNAME=ib0"),
        ([], {"GLOO_SOCKET_IFNAME": "eth0"}, PASS, "as GLOO_SOCKET_IFNAME says", ""),
        ([], {"GLOO_SOCKET_IFNAME": "eth0, eth9"}, FAIL, "GLOO_SOCKET_IFNAME names eth9", "eth0, ib0, lo"),
    ],
)
def test_the_interface_of_gloo(
    resolves_to: list[str],
    variables: dict[str, str],
    status: Status,
    detail: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(host: str, port: None, **options: Any) -> list[Any]:
        if not resolves_to:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolves_to]

    monkeypatch.setattr(socket, "gethostname", lambda: "a-secret-name")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    finding = network.check_gloo_interface((LO, ETH0, IB0), variables)
    expect(finding, status, detail, fix)
    assert "secret" not in finding.public_detail
    assert ("a-secret-name" in finding.detail) == (status is not PASS and "GLOO_SOCKET_IFNAME" not in variables)


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(network, "DEFAULT_PORT", taken.getsockname()[1])
        expect(network.check_ports(), WARN, "is taken", "MASTER_PORT")
    expect(network.check_ports(), PASS, "is free")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(socket, "create_server", refuse)
    expect(network.check_ports(), FAIL, "no port can be opened on loopback: EACCES", "lo is up")


# -- the link ---------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_link() -> None:
    seconds = {"4096": 0.0002, "4194304": 0.004, "33554432": 0.016}
    finding = network.measured("gloo", 2, seconds)
    expect(finding, PASS, "all-reduce between 2 ranks")
    assert [line.split() for line in finding.detail.splitlines()[1:]] == [
        ["4", "KiB", "0.200", "ms", "0.020", "GB/s"],
        ["4", "MiB", "4.000", "ms", "1.049", "GB/s"],
        ["32", "MiB", "16.000", "ms", "2.097", "GB/s"],
    ]
    # One rank moves nothing, so its numbers would only impress.
    alone = network.measured("nccl", 1, seconds)
    expect(alone, PASS, "NCCL starts and reduces")
    assert "GB/s" not in alone.detail
    expect(network.measured("gloo", 2, seconds | {"4096": 0.006}), WARN, "6.000 ms", "top")
    expect(network.measured("gloo", 2, seconds | {"4194304": 0.03, "33554432": 0.2}), WARN, "200.000 ms", "top")


@pytest.fixture
def rank_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts other code in the place of the ranks."""

    def write(code: str) -> None:
        script = tmp_path / "rank.py"
        script.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{code}\n")
        monkeypatch.setattr(network, "RANK_SCRIPT", script)

    return write


def outcome(timeout: float) -> Finding:
    with ExitStack() as stack:
        ranks = network.LinkTest("gloo", 2, timeout, stack)
        pids = [process.pid for process in ranks._processes._processes]
        assert len(pids) == 2
        finding = ranks.finding()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert all(file.closed for file in (*ranks._outputs, *ranks._errors))
    return finding


def test_a_rank_of_the_link_that_fails(rank_script: Callable[[str], None]) -> None:
    rank_script(
        "time.sleep(100 * (1 - rank))\nraise ConnectionError('[enforce fail at /a/b.cc:84] no way to 192.0.2.9')"
    )
    finding = outcome(30)
    expect(finding, FAIL, "rank 1 of 2 failed: ConnectionError: no way to 192.0.2.9", "see the lines on")
    assert finding.public_detail == "rank 1 of 2 failed with exit code 1"
    rank_script("os.kill(os.getpid(), 9)")
    expect(outcome(30), FAIL, "failed: signal 9", "see the lines on")


def test_ranks_of_the_link_that_hang(rank_script: Callable[[str], None]) -> None:
    rank_script("print('ready', flush=True)\ntime.sleep(100)")
    # A busy machine may need longer than the first of them to start a rank.
    for timeout in (2, 10, 50):
        finding = outcome(timeout)
        if finding.status is not WARN:
            break
    expect(finding, FAIL, "had not finished", "may not reach each other")


def test_ranks_of_the_link_that_had_no_time(rank_script: Callable[[str], None]) -> None:
    rank_script("time.sleep(100)")
    expect(outcome(0.2), WARN, "not measured", "--timeout 60")
    rank_script("time.sleep(0.6)\nprint('ready', flush=True)\ntime.sleep(100)")
    expect(outcome(1), WARN, "not measured", "--timeout 60")


# -- the whole --------------------------------------------------------------------------------------------------------


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> Finding:
        raise OSError("no /secret/path")

    finding = guarded("memory", broken)
    expect(finding, FAIL, "the check itself failed: OSError: no /secret/path", "report")
    assert "secret" not in finding.public_detail
    assert finding.name == "memory"


GOOD = Finding(name="cores", status=PASS, detail="2 usable")
POOR = Finding(name="gloo", status=WARN, detail="vm is loopback", fix="export A=b", public="loopback")
BAD = Finding(name="gloo link", status=FAIL, detail="failed:\n  192.0.2.1", fix="repair it", public="failed:\n  there")


@pytest.mark.parametrize(
    ("findings", "code", "sentence"),
    [
        ([GOOD], 0, "Fit for data-parallel training."),
        ([GOOD, POOR], 0, "Fit for data-parallel training, with a remark on gloo."),
        ([GOOD, BAD, POOR], 1, "Not fit for data-parallel training yet: see gloo link."),
    ],
)
def test_the_output_without_a_terminal(
    findings: list[Finding], code: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "examine", lambda **options: findings)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert "\x1b" not in result.output
    table, block = result.output.split("For a bug report")
    assert sentence in table.splitlines()
    for finding in findings:
        assert any(
            line.split() == [finding.status, *finding.name.split(), *finding.detail.splitlines()[0].split()]
            for line in table.splitlines()
        )
        assert finding.fix in table
    assert "PASS cores: 2 usable" in block
    assert ("FAIL gloo link: failed:; there" in block) == (BAD in findings)
    assert "192.0.2.1" not in block
    assert "vm" not in block


def test_the_output_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    console = Console(force_terminal=True, width=60, highlight=False, color_system="standard", legacy_windows=False)
    command._show(console, [GOOD, POOR, BAD])
    output = capsys.readouterr().out
    assert "\x1b[32mPASS" in output
    assert "\x1b[33mWARN" in output
    assert "\x1b[1;31mFAIL" in output
    assert output.index("export A=b") > output.index("vm is loopback")


def test_other_ranks_of_this_machine_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "examine", lambda **options: [BAD])
    second = TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"}
    result = CliRunner().invoke(app, ["doctor"], env=second)
    assert (result.exit_code, result.output) == (0, "")
    assert CliRunner().invoke(app, ["doctor"], env=TORCHRUN).exit_code == 1


NAMES = ["python", "torch", "backends", "packages", "launcher", "gpus", "cores", "memory", "shared memory"]
NAMES += ["open files", "interfaces", "gloo", "ports", "gloo link"]


@pytest.mark.program
def test_the_command_measures_the_link() -> None:
    result = run_python("-m", "gradsync", "doctor", "--json", "--timeout", "60")
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert set(answer) == {"fit", "versions", "findings"}
    assert set(answer["versions"]) == {"gradsync", "torch", "python"}
    findings = answer["findings"]
    assert [finding["name"] for finding in findings if finding["name"] != "nccl link"] == NAMES
    for finding in findings:
        assert set(finding) == {"name", "status", "detail", "fix"}
        assert all(isinstance(value, str) for value in finding.values())
        assert (finding["status"] == "PASS") == (finding["fix"] == "")
    assert answer["fit"] == all(finding["status"] != "FAIL" for finding in findings)
    assert result.returncode == (0 if answer["fit"] else 1)
    measured = next(finding for finding in findings if finding["name"] == "gloo link")
    assert measured["status"] in ("PASS", "WARN"), measured
    lines = [line.split("ms")[0].split() for line in measured["detail"].splitlines()]
    sizes = [["4", "KiB"], ["256", "KiB"], ["4", "MiB"], ["32", "MiB"]]
    assert [words[:2] for words in lines[1:5]] == [words[:2] for words in lines[6:]] == sizes
    assert " ".join(lines[5]) == "gradsync takes shared memory (all 2 ranks are on one host)"


@pytest.mark.program
def test_the_command_finds_what_is_wrong() -> None:
    """Gloo really fails where the check of its interface says it will, and a launcher's leftovers break nothing."""
    wrong = {"GLOO_SOCKET_IFNAME": "nosuch0", "RANK": "x"}
    result = CliRunner().invoke(app, ["doctor", "--timeout", "60"], env=wrong)
    assert result.exit_code == 1
    assert "Traceback" not in result.stdout + result.stderr
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    failed = {line[6:19].strip() for line in result.stdout.splitlines() if line.startswith("FAIL  ")}
    assert failed == {"launcher", "gloo", "gloo link"}
    assert "Not fit for data-parallel training yet: see launcher, gloo, gloo link." in result.stdout
    block = result.stdout.split("For a bug report")[1]
    assert socket.gethostname() not in block.split()
    assert not any(address in block for each in network.list_interfaces() for address in each.addresses)
    assert sys.prefix not in block


def test_gpus_are_measured_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert doctor._backends() == [("gloo", 2), ("nccl", 3)]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert doctor._backends() == [("gloo", 2)]
