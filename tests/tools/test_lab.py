"""Labs on the real system, and emulated accelerators. What needs namespaces is skipped where they cannot be made."""

import multiprocessing
import os
import re
import shlex
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import gradsync
from gradsync.errors import ConfigurationError, GradsyncError, MisuseError
from gradsync.lab import (
    EmulatedModel,
    Lab,
    LabError,
    LabPlan,
    Profile,
    Rate,
    bert_base,
    fork_ranks,
    read_counters,
    resnet50,
    transformer,
)
from gradsync.testing import run_ranks
from gradsync.tools.cli.main import app
from gradsync.tools.lab.far_link import DelayLine
from gradsync.tools.lab.lab import take_down
from gradsync.tools.lab.system import NAMESPACES, check_fit, inside, ip, lab_names, processes, switch_name, tc
from tests.processes import eventually

RATE = Rate.parse("400mbit")
NAME = f"test{os.getpid()}"


def why_no_lab() -> str | None:
    try:
        check_fit()
        probe = f"gradsync-probe{os.getpid()}-switch"
        ip("netns", "add", probe)
        ip("netns", "delete", probe)
    except GradsyncError as error:
        return f"no lab here: {error}"
    return None


NO_LAB = why_no_lab()
# One worker: they change the same system.
needs_lab = [
    pytest.mark.skipif(NO_LAB is not None, reason=str(NO_LAB)),
    pytest.mark.timeout(60),
    pytest.mark.xdist_group("lab"),
]


def with_lab(test: Callable[..., None]) -> Callable[..., None]:
    for mark in needs_lab:
        test = mark(test)
    return test


@pytest.fixture
def nothing_left() -> Iterator[str]:
    """The name of a lab, of which nothing must be left."""
    links = ip("-brief", "link", "show")
    yield NAME
    left = NAME in lab_names()
    take_down(NAME)
    assert not left
    assert ip("-brief", "link", "show") == links, "the machine's own network was changed"


@pytest.fixture
def lab(nothing_left: str) -> Iterator[Lab]:
    with Lab(LabPlan(name=nothing_left, rate=RATE)) as lab:
        yield lab


# The hosts


@with_lab
def test_links_are_shaped_at_both_ends(lab: Lab) -> None:
    ends = [(host.namespace, host.interface) for host in lab.hosts]
    ends += [(switch_name(NAME), host.name) for host in lab.hosts]

    def rates() -> set[tuple[str, int]]:
        queues = [tc.json("qdisc", "show", "dev", device, "root", namespace=name)[0] for name, device in ends]
        return {(queue["kind"], queue["options"].get("rate", 0) * 8) for queue in queues}

    assert rates() == {("tbf", 400_000_000)}
    lab.set_rate(Rate.parse("1gbit"))
    assert rates() == {("tbf", 10**9)}
    assert {link.rate for link in lab.links().values()} == {Rate.parse("1gbit")}
    lab.set_rate(None)
    lab.set_rate(None)
    assert {kind for kind, _ in rates()}.isdisjoint({"tbf"})


# Hosts that are far apart


def test_frames_arrive_in_order_after_the_delay() -> None:
    line = DelayLine(0.5, 0.0)
    for number in range(3):
        line.send(number / 10, number % 2, bytes([number]))
    assert line.until_next(0.2) == pytest.approx(0.3)
    assert line.arrived(0.4) == []
    assert line.arrived(0.65) == [(0, b"\0"), (1, b"\1")]
    assert line.arrived(9.0) == [(0, b"\2")]
    assert line.until_next(9.0) is None


def test_as_many_frames_are_lost_as_was_asked_for() -> None:
    line = DelayLine(0.0, 0.1)
    for _ in range(10_000):
        line.send(0.0, 0, b"")
    # Five standard deviations.
    assert len(line.arrived(0.0)) == pytest.approx(9_000, abs=150)


@with_lab
def test_hosts_are_as_far_apart_as_was_asked_for(nothing_left: str) -> None:
    """A round trip cannot take less than twice the delay."""
    with Lab(LabPlan(name=nothing_left, rate=RATE, delay=0.1)) as lab:
        server = listener_on(lab, 0)
        with server, connect(lab, 1, server.getsockname(), 20.0) as caller, server.accept()[0] as answering:
            took = []
            for _ in range(5):
                began = time.monotonic()
                caller.sendall(b"?")
                answering.sendall(answering.recv(1))
                assert caller.recv(1) == b"?"
                took.append(time.monotonic() - began)
        assert min(took) >= 0.2
    for wrong in ({"delay": -1.0}, {"delay": 11.0}, {"loss": 1.0}):
        with pytest.raises(ConfigurationError, match=r"seconds|probability"):
            LabPlan(**wrong)  # type: ignore[arg-type]


@with_lab
def test_a_far_lab_loses_packets(nothing_left: str) -> None:
    plan = LabPlan(name=nothing_left, rate=RATE, loss=0.3)
    with Lab(plan) as lab:
        assert Lab.find(nothing_left).plan == plan
        here, there = (inside(host.namespace, partial(datagrams, host.address)) for host in lab.hosts)
        with here, there:
            here.settimeout(0.3)
            arrived = 0
            for _ in range(20):
                for _ in range(50):
                    there.sendto(b"?", here.getsockname())
                # Few at once, so that the system loses none.
                with suppress(TimeoutError):
                    for _ in range(50):
                        arrived += len(here.recv(1))
        # Five standard deviations; a lost question for the address takes some along.
        assert arrived == pytest.approx(700, abs=120)
        lab.cut(1)
        assert not lab.links()[1].up


def datagrams(address: str) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.bind((address, 0))
    return found


def listener_on(lab: Lab, index: int) -> socket.socket:
    """A socket keeps the network of the thread that made it."""
    host = lab.hosts[index]
    return inside(host.namespace, lambda: socket.create_server((host.address, 0)))


def connect(lab: Lab, index: int, address: tuple[str, int], timeout: float) -> socket.socket:
    return inside(lab.hosts[index].namespace, lambda: socket.create_connection(address, timeout))


@with_lab
def test_a_link_can_be_cut_and_healed(lab: Lab) -> None:
    with listener_on(lab, 1) as listener:
        address = listener.getsockname()
        connect(lab, 0, address, 10.0).close()
        lab.cut(1)
        assert [link.up for link in lab.links().values()] == [True, False]
        with pytest.raises(OSError, match=r"timed out|[Nn]o route"):
            connect(lab, 0, address, 0.3)
        lab.heal(1)
        connect(lab, 0, address, 20.0).close()
    with pytest.raises(ConfigurationError, match="hosts 0 to 1, got 2"):
        lab.cut(2)


@with_lab
def test_counters_grow_by_what_is_sent(lab: Lab) -> None:
    size = 1_000_000
    before = lab.counters()
    with listener_on(lab, 1) as listener, connect(lab, 0, listener.getsockname(), 10.0) as client:
        server, _ = listener.accept()
        with server:
            server.settimeout(20.0)
            client.sendall(bytes(size // 10))
            for _ in range(9):
                client.sendall(bytes(size // 10))
                received = 0
                while received < size // 10:
                    received += len(server.recv(size // 10 - received))
            received = 0
            while received < size // 10:
                received += len(server.recv(size))
    after = lab.counters()
    assert size <= after[0].sent - before[0].sent < 1.1 * size
    assert size <= after[1].received - before[1].received < 1.1 * size
    assert after[1].sent - before[1].sent < 0.1 * size


# Ranks


def add_over_the_link() -> None:
    """One rank of an all-reduce; what it finds wrong becomes a LabError in the test."""
    before = read_counters("eth0")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensor = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((100_000,), 3.0))
    dist.barrier()
    # Half of the tensor in either phase, and it went over the link, not over loopback.
    assert 400_000 <= read_counters("eth0").sent - before.sent < 600_000
    assert socket.gethostname() == f"host{rank}"
    assert sorted(os.listdir("/sys/class/net")) == ["eth0", "lo"]
    dist.destroy_process_group()


@with_lab
def test_forked_ranks_reduce_across_hosts(lab: Lab) -> None:
    fork_ranks(lab, add_over_the_link, timeout=50.0)


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("this rank is unwell")
    time.sleep(1000)


@with_lab
def test_a_failed_rank_is_named_and_the_others_end(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LabError, match="rank 1 on host1 failed with exit code 1"):
        fork_ranks(lab, fail_on_rank_1)
    assert "ValueError: this rank is unwell" in capfd.readouterr().err
    late = r"after 0\.2 s there still ran rank 0 on host0, rank 1 on host1\. They were ended, where they stood is above"
    with pytest.raises(LabError, match=late):
        fork_ranks(lab, lambda: time.sleep(1000), timeout=0.2)
    assert lab.processes() == {0: [], 1: []}
    assert lab.run(["sh", "-c", "[ $RANK = 0 ] || { echo unwell; kill -9 $$; }; sleep 1000"]) == 137
    shown = capfd.readouterr().err
    assert "[rank 1] unwell" in shown
    assert "rank 1 on host1 was ended by signal 9 (SIGKILL)" in shown
    assert lab.processes() == {0: [], 1: []}


SHOW_VARIABLES = """
import os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS GLOO_SOCKET_IFNAME MINE"
print(*[os.environ[name] for name in names.split()], flush=True)
open("/sys/class/net/eth0/statistics/tx_bytes").read()
raise SystemExit(7 if os.environ["RANK"] == os.environ.get("FAILING") else 0)
"""


@with_lab
def test_a_command_runs_once_a_rank(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-S", "-c", SHOW_VARIABLES]
    chosen = {"MINE": "kept", "RANK": "9", "OMP_NUM_THREADS": "1"}
    assert lab.run(command, ranks_per_host=2, env=chosen) == 0
    first = lab.hosts[0].address
    assert capfd.readouterr() == (f"0 4 0 2 0 {first} 1 eth0 kept\n", "")
    assert lab.run(command, ranks_per_host=2, env={**chosen, "FAILING": "3"}) == 7
    shown = capfd.readouterr().err
    assert f"[rank 3] 3 4 1 2 1 {first} 1 eth0 kept\n" in shown
    assert "rank 3 on host1 failed with exit code 7" in shown


def test_ranks_on_this_machine_meet_over_loopback() -> None:
    def work() -> None:
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        dist.init_process_group("gloo")
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 10
        dist.destroy_process_group()

    fork_ranks(None, work, ranks=3, timeout=60.0)


# Owners


def own_a_lab(name: str) -> None:
    """Each of its ranks is a shell with one process that it waits for and one in the background."""
    with Lab(LabPlan(name=name)) as lab:
        lab.run(["sh", "-c", "setsid sleep 1000 & sleep 1000"])


def all_processes(name: str) -> list[int]:
    spaces = [path.name for path in NAMESPACES.glob(f"gradsync-{name}-host*")]
    return [pid for space in spaces for pid in processes(space)]


@with_lab
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_an_owner_that_is_ended_leaves_nothing_for_long(nothing_left: str, number: signal.Signals) -> None:
    owner = multiprocessing.get_context("fork").Process(target=own_a_lab, args=(nothing_left,))
    owner.start()
    try:
        assert eventually(lambda: len(all_processes(nothing_left)) == 6)
        with pytest.raises(LabError, match=f"already up and belongs to process {owner.pid}.* gradsync lab down"):
            Lab(LabPlan(name=nothing_left)).__enter__()
        assert owner.pid is not None
        os.kill(owner.pid, number)
    finally:
        owner.join(30)
    if number is signal.SIGTERM:
        assert owner.exitcode == 128 + number
        assert nothing_left not in lab_names()
        return
    # The ranks, which were shells, have died with it; their children have not.
    assert eventually(lambda: len(all_processes(nothing_left)) == 4)
    background = all_processes(nothing_left)
    with Lab(LabPlan(name=nothing_left)) as lab:
        assert lab.processes() == {0: [], 1: []}
        assert eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in background))


@with_lab
def test_labs_do_not_collide(lab: Lab) -> None:
    other = f"{NAME}-2"
    with Lab(LabPlan(name=other, hosts=1)) as second:
        assert second.hosts[0].address.rpartition(".")[0] != lab.hosts[0].address.rpartition(".")[0]
        assert {NAME, other} <= set(lab_names())
    assert other not in lab_names()
    assert NAME in lab_names()
    with pytest.raises(MisuseError, match="is not up"):
        second.hosts  # noqa: B018


# The command line


@with_lab
def test_the_commands(nothing_left: str, capfd: pytest.CaptureFixture[str]) -> None:
    def lab(*words: str, code: int = 0) -> str:
        answer = CliRunner().invoke(app, ["lab", words[0], "--name", nothing_left, *words[1:]])
        assert answer.exit_code == code, answer.exception
        return answer.output + str(answer.exception)

    assert "host1" in lab("up", "--hosts", "2", "--rate", "2.5gbit")
    assert "already up" in lab("up", code=1)
    lab("cut", "1")
    shown = lab("status").splitlines()
    assert [line.split()[2:4] for line in shown[2:4]] == [["2.5gbit", "up"], ["2.5gbit", "cut"]]
    lab("heal", "1")
    lab("run", "--ranks-per-host", "2", "--", "sh", "-c", "[ $RANK = 0 ]", code=1)
    lab("run", "--", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"')
    assert capfd.readouterr().out == "0 of 2\n"
    assert "800kbit" in lab("rate", "800kbit")
    lab("down")
    assert "is not up" in lab("down", code=1)
    assert "is not up" in lab("status", code=1)


@with_lab
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("up --rate 0mbit", "between 8kbit and 1000gbit"),
        ("run -- true", f"the lab {NAME} is not up. Make it with: gradsync lab up"),
        ("cut 0", "is not up"),
        ("down", "is not up"),
    ],
    ids=["no bits", "run", "cut", "down"],
)
def test_bad_input_is_said_in_one_line(nothing_left: str, words: str, message: str) -> None:
    command, *others = words.split()
    answer = CliRunner().invoke(app, ["lab", command, "--name", nothing_left, *others])
    assert answer.exit_code != 0
    assert isinstance(answer.exception, GradsyncError)
    assert message in str(answer.exception)


def test_a_lab_needs_root_and_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.tools.lab.system.SEARCHED", "/nowhere")
    with pytest.raises(ConfigurationError, match=r"ip and tc.* apt install iproute2"):
        Lab(LabPlan()).__enter__()
    monkeypatch.undo()
    if NO_LAB is None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(ConfigurationError, match=r"needs root.* user 1000"):
            Lab(LabPlan()).__enter__()


PAGE = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()


@with_lab
def test_the_commands_of_the_page(nothing_left: str, capfd: pytest.CaptureFixture[str]) -> None:
    # The other block needs a GPU: test_lab_gpu.py.
    block, _ = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        program, group, command, *others = shlex.split(line)
        assert (program, group) == ("gradsync", "lab")
        answer = CliRunner().invoke(app, ["lab", command, "--name", nothing_left, *others])
        assert answer.exit_code == 0, f"{line}: {answer.exception}"
    assert re.fullmatch(r"host0\nrank 0 of 4 meets at 10\.\d+\.\d+\.1\n", capfd.readouterr().out)


@with_lab
def test_the_script_of_the_page(nothing_left: str, capfd: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"^((?:    .*\n|\n)*    with Lab.*\n(?:    .*\n)*)", PAGE, re.MULTILINE)
    exec(textwrap.dedent(block).replace('"mine"', repr(nothing_left)), {})
    shown = capfd.readouterr().out
    assert shown.count("one rank a host") == 2
    assert "bytes sent by host 0" in shown


# Rates


@pytest.mark.parametrize(
    ("text", "bits", "written"),
    [
        ("400mbit", 400_000_000, "400mbit"),
        ("1gbit", 10**9, "1gbit"),
        ("2.5Gbit/s", 2_500_000_000, "2.5gbit"),
        ("800 kbit", 800_000, "800kbit"),
        ("50MB/s", 400_000_000, "400mbit"),
        ("1000000bit", 10**6, "1mbit"),
    ],
)
def test_rates(text: str, bits: int, written: str) -> None:
    rate = Rate.parse(text)
    assert (rate.bits_per_second, str(rate), rate.bytes_per_second) == (bits, written, bits / 8)
    assert Rate.parse(str(rate)) == rate


@pytest.mark.parametrize("text", ["", "fast", "400", "400mb", "10mbps", "-1gbit", "1e9bit", "1gbit2", "1Mb/s", "7bit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"400mbit|8kbit"):
        Rate.parse(text)


# Emulated accelerators


@pytest.mark.parametrize(
    ("profile", "parameters", "tensors"), [(resnet50(), 25_557_032, 161), (bert_base(), 109_482_240, 199)]
)
def test_emulated_models_have_the_real_shapes(profile: Profile, parameters: int, tensors: int) -> None:
    assert (profile.parameters, profile.tensors) == (parameters, tensors)
    with torch.device("meta"):
        model = EmulatedModel(profile)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    small = profile.scaled(parameters=0.1, seconds=0.5)
    assert small.tensors == tensors
    assert small.parameters == pytest.approx(0.1 * parameters, rel=0.01)
    assert small.forward_seconds + small.backward_seconds == pytest.approx(
        0.5 * (profile.forward_seconds + profile.backward_seconds)
    )


def test_names_are_those_of_the_real_models() -> None:
    with torch.device("meta"):
        names = dict(EmulatedModel(resnet50()).named_parameters())
        bert = dict(EmulatedModel(bert_base()).named_parameters())
    assert names["layer2.0.downsample.0.weight"].shape == (512, 256, 1, 1)
    assert names["fc.weight"].shape == (1000, 2048)
    assert bert["encoder.layer.11.attention.self.query.bias"].shape == (768,)


def test_a_transformer_has_about_the_parameters_asked_for() -> None:
    profile = transformer(parameters=30_000_000, layers=6, seconds=0.2)
    assert profile.parameters == pytest.approx(30_000_000, rel=0.001)
    with pytest.raises(ConfigurationError, match="at least 1 layer"):
        transformer(parameters=100, layers=1, seconds=1.0)
    with pytest.raises(ConfigurationError, match="above 0"):
        profile.scaled(seconds=0.0)


def small_model() -> EmulatedModel:
    return EmulatedModel(resnet50(), time_scale=0.05, size_scale=0.01)


def assert_gradients(model: EmulatedModel, mean: float) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        lowest, highest = (value.item() for value in torch.aminmax(parameter.grad))
        expected = model.gradient_of(name, mean)
        assert abs(lowest - expected) < 1e-6, name
        assert abs(highest - expected) < 1e-6, name


def test_gradients_come_layer_by_layer_from_the_last() -> None:
    model = small_model()
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name.rpartition(".")[0]))
    loss = model(torch.tensor([1.0, 3.0]))
    assert loss.item() == 2.0
    (loss / 2).backward()
    assert_gradients(model, 1.0)
    layers = [layer.name for layer in model.profile.layers]
    assert list(dict.fromkeys(order)) == layers[::-1]


def test_gradsync_averages_an_emulated_model() -> None:
    def train(rank_of: Callable[[], int]) -> EmulatedModel:
        model = small_model()
        wrapped = gradsync.DistributedDataParallel(model)
        wrapped(torch.tensor(1.0 + 2 * rank_of())).backward()
        return model

    for model in run_ranks(train, 2, lambda: gradsync.testing.communicator().rank):
        assert_gradients(model, 2.0)


def test_ddp_averages_an_emulated_model() -> None:
    small_model()(torch.tensor(1.0)).backward()  # a process that has run a backward can be forked

    def work() -> None:
        dist.init_process_group("gloo")
        model = small_model()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            model.zero_grad()
            wrapped(torch.tensor(1.0 + 2 * dist.get_rank())).backward()
            assert_gradients(model, 2.0)
        # The wrapper outlives a group that is destroyed here, and what is left of both would be ended behind our back.
        dist.barrier()

    fork_ranks(None, work, ranks=2, timeout=60.0)
