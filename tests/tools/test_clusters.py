"""Batch scripts and manifests: what the packages of Kubernetes and Kubeflow read, and what the page shows."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gradsync.base.environment import DEFAULT_PORT
from gradsync.errors import ConfigurationError
from gradsync.lab import Lab, LabPlan
from gradsync.tools.clusters import CHOSEN_PORTS, LIGHTHOUSE_PORT, ClusterJob, kubernetes_manifests, slurm_script
from gradsync.tools.lab.host import Host, run_at
from gradsync.tools.lab.system import enter_host, processes
from gradsync.tools.launch import Failure, RankPlace, RankProcesses
from gradsync.tools.llm.run_folder import read_metrics
from tests.pages import ROOT, blocks
from tests.processes import eventually
from tests.tools.test_lab import nothing_left, with_lab

yaml = pytest.importorskip("yaml")

__all__ = ["nothing_left"]

TRAIN = ("-m", "gradsync", "train", "--run-folder", "/shared/run")


def fixed(**more: Any) -> ClusterJob:
    return ClusterJob(
        **({"name": "gradsync", "program": ("train.py", "--lr", "0.1"), "nodes": 2, "ranks_per_node": 8} | more)
    )


def elastic(**more: Any) -> ClusterJob:
    return fixed(**({"program": TRAIN, "ranks_per_node": 4, "gpus": False, "elastic": True} | more))


def manifests(job: ClusterJob) -> dict[str, dict[str, Any]]:
    found = {each["kind"]: each for each in yaml.safe_load_all(kubernetes_manifests(job)) if each is not None}
    assert len(found) == kubernetes_manifests(job).count("kind:")
    return found


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def read_back(manifest: dict[str, Any]) -> Any:
    """The manifest as the models of its API read it: values of another type are refused, unknown fields dropped."""
    kubernetes = pytest.importorskip("kubernetes.client.models")
    kubeflow = pytest.importorskip("kubeflow_trainer_api.models")
    if manifest["kind"] == "TrainJob":
        return kubeflow.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    model = getattr(kubernetes, f"V1{manifest['kind']}").from_dict(manifest)
    return json.loads(model.model_dump_json(by_alias=True, exclude_none=True))


@pytest.mark.program
@pytest.mark.parametrize(
    "job", [fixed(), fixed(gpus=False), elastic(), elastic(min_ranks=3)], ids=["fixed", "cpu", "elastic", "some"]
)
def test_manifests_are_what_the_models_of_kubernetes_and_kubeflow_accept(job: ClusterJob) -> None:
    for manifest in manifests(job).values():
        assert read_back(manifest) == manifest


@pytest.mark.program
def test_a_manifest_that_is_none_is_seen() -> None:
    for job, kind, path in [(fixed(), "TrainJob", "trainer"), (elastic(), "Job", "template")]:
        wrong = manifests(job)[kind]
        wrong["spec"][path]["wings"] = 2
        assert read_back(wrong) != wrong
    with pytest.raises(ValueError, match="numNodes"):
        read_back(
            manifests(fixed(nodes=2))["TrainJob"]
            | {"spec": {"runtimeRef": {"name": "x"}, "trainer": {"numNodes": "2"}}}
        )


def test_a_train_job_starts_torchrun_on_all_nodes() -> None:
    trainer = manifests(fixed(image="registry.example/train:1"))["TrainJob"]["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "train.py", "--lr", "0.1"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 8, "registry.example/train:1")
    assert trainer["resourcesPerNode"] == {"requests": {"cpu": "8"}, "limits": {"nvidia.com/gpu": "8"}}


def test_parts_of_an_elastic_job_find_each_other() -> None:
    found = manifests(elastic(name="run-1"))
    job, lighthouse, service = found["Job"]["spec"], found["Deployment"]["spec"], found["Service"]
    container = job["template"]["spec"]["containers"][0]
    port = service["spec"]["ports"][0]["port"]
    assert {"name": "TORCHFT_LIGHTHOUSE", "value": f"http://{service['metadata']['name']}:{port}"} in container["env"]
    labels = lighthouse["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == lighthouse["selector"]["matchLabels"]
    assert lighthouse["template"]["spec"]["containers"][0]["command"][-2:] == ["--bind", f"0.0.0.0:{port}"]
    # The policy is for the lighthouse and the ranks, and the lighthouse takes no rank for its own.
    selected = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    ranks = job["template"]["metadata"]["labels"]
    assert selected.items() <= labels.items()
    assert selected.items() <= ranks.items()
    assert labels != ranks


def test_a_network_policy_opens_the_ports_that_ranks_use_to_ranks() -> None:
    chosen = tuple(map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    for job, meeting in ((fixed(), DEFAULT_PORT), (elastic(), LIGHTHOUSE_PORT)):
        policy = manifests(job)["NetworkPolicy"]["spec"]
        (rule,) = policy["ingress"]
        assert rule["from"] == [{"podSelector": policy["podSelector"]}]
        assert [(each["port"], each.get("endPort")) for each in rule["ports"]] == [(meeting, None), CHOSEN_PORTS]
    assert chosen == CHOSEN_PORTS, "this machine is not set up as Linux is by default"


def test_words_reach_the_script_as_they_are() -> None:
    words = ("train.py", "--text", 'a "b" $(HOME) $x\n\\ é', "a: b # c")
    command = manifests(fixed(program=words))["TrainJob"]["spec"]["trainer"]["command"]
    assert [word.replace("$$(", "$(") for word in command[1:]] == list(words)
    assert "$$(HOME)" in command[3], "Kubernetes would put a variable there"
    script = slurm_script(fixed(program=words))
    assert shlex.split(script.partition('port" \\\n')[2]) == list(words)


# -- the command ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_launched_is_refused() -> None:
    for wrong, message in [
        ({"nodes": 0}, "--nodes must be at least 1"),
        ({"ranks_per_node": 0}, "--nproc must be at least 1"),
        ({"name": "My run"}, "--name must be"),
        ({"name": "x" * 46}, "--name must be"),
        ({"elastic": True}, "-m gradsync train"),
        ({"elastic": True, "program": TRAIN}, "give --cpu with --elastic"),
        ({"elastic": True, "program": TRAIN, "gpus": False, "min_ranks": 17}, "there are only 16 ranks"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            fixed(**wrong)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_shows_what_its_commands_write(in_folder: Path, run_main: Callable[..., int]) -> None:
    page = [block for block in blocks() if block.page == "clusters.md"]
    commands = [
        line for block in page if block.language == "bash" for line in block.code.splitlines() if "launch" in line
    ]
    shown = [block.code for block in page if block.language in ("", "yaml")]
    written = []
    for line in commands:
        assert run_main(*shlex.split(line)[1:]) == 0
        written.append(next(in_folder.iterdir()).read_text())
        next(in_folder.iterdir()).unlink()
    slurm, kubernetes, elastic_slurm, elastic_kubernetes = written
    assert shown[0] == slurm
    assert shown[1] == kubernetes
    assert elastic_slurm.endswith(shown[2])
    assert "kind: Deployment" in elastic_kubernetes


def test_a_file_is_submitted_unless_it_is_a_dry_run(
    in_folder: Path, run_main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--nodes", "2", "--nproc", "1", "train.py"]
    monkeypatch.setenv("PATH", str(in_folder))
    assert run_main("launch", "--on", "slurm", *options) == 1
    assert re.search(r"there is no sbatch here", capfd.readouterr().err)
    program = in_folder / "kubectl"
    program.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    program.chmod(0o755)
    assert run_main("launch", "--on", "kubernetes", "--dry-run", *options) == 0
    assert capfd.readouterr().out == "gradsync.yaml is written. Submit it with: kubectl apply -f gradsync.yaml\n"
    assert run_main("launch", "--on", "kubernetes", *options) == 3
    assert capfd.readouterr().out == "apply -f gradsync.yaml\n"
    assert run_main("launch", "--on", "moon", *options) == 2
    assert "--on must be slurm or kubernetes, got 'moon'" in capfd.readouterr().err


# -- the commands, as they stand --------------------------------------------------------------------------------------

SCRIPT = str(ROOT / "tests" / "cluster_script.py")
# The programs of this environment, and gradsync as it is here.
PROGRAMS = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def assert_trained(folder: Path, nodes: list[int]) -> list[dict[str, Any]]:
    """Ranks on these nodes have trained together; returns what each of them saw."""
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(nodes))]
    assert [each["node"] for each in seen] == nodes
    assert {each["ranks"] for each in seen} == {len(nodes)}
    assert all(each["weights"] == seen[0]["weights"] != each["before"] for each in seen)
    return seen


@pytest.mark.program
@with_lab
@pytest.mark.timeout(180)
def test_the_command_of_a_train_job_runs_on_two_hosts_and_uses_the_open_ports(
    nothing_left: str, tmp_path: Path
) -> None:
    """Each host has the name that a pod would have, and the variables that Kubeflow gives it."""
    found = manifests(fixed(program=(SCRIPT, str(tmp_path)), ranks_per_node=2, gpus=False))
    trainer, rules = found["TrainJob"]["spec"]["trainer"], found["NetworkPolicy"]["spec"]["ingress"]
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "gradsync-node-0-0.gradsync",
        "PET_MASTER_PORT": str(DEFAULT_PORT),
        **{each["name"]: each["value"] for each in trainer["env"]},
    }

    def become_pod(place: RankPlace) -> None:
        program = shutil.which(trainer["command"][0], path=PROGRAMS["PATH"])
        assert program is not None
        os.execve(program, trainer["command"], PROGRAMS | variables | {"PET_NODE_RANK": str(place.rank)})

    with Lab(LabPlan(name=nothing_left, hosts=2)) as lab:
        pods = [f"gradsync-node-0-{host.index}" for host in lab.hosts]
        names = {host.address: f"{pod}.gradsync {pod}" for host, pod in zip(lab.hosts, pods, strict=True)}
        places = [
            RankPlace(
                local=(0, 1),
                node=(host.index, 2),
                master=("", 0),
                enter=partial(enter_host, host.namespace, pods[host.index], {v: k for k, v in names.items()}),
            )
            for host in lab.hosts
        ]
        assert run_at(places, become_pod, 150) is None
    seen = assert_trained(tmp_path, [0, 0, 1, 1])
    opened = [range(each["port"], each.get("endPort", each["port"]) + 1) for each in rules[0]["ports"]]
    ports = {port for each in seen for port in each["ports"]}
    assert len(ports) > 2
    assert DEFAULT_PORT in ports
    assert [port for port in ports if not any(port in each for each in opened)] == []


# -- Slurm, with its own daemons on the hosts of a lab ----------------------------------------------------------------

SLURM_CONF = """\
ClusterName=gradsync
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
DAEMONS = ("munged", "slurmctld", "slurmd")
SEARCHED = f"{PROGRAMS['PATH']}:/usr/sbin:/sbin"
NO_SLURM = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SEARCHED) is None]


def on(host: Host, hosts: tuple[Host, ...]) -> RankPlace:
    """The place of one process on a host of a lab."""
    addresses = {each.name: each.address for each in hosts}
    enter = partial(enter_host, host.namespace, host.name, addresses)
    return RankPlace(local=(0, 1), node=(host.index, len(hosts)), master=("", 0), host=host.name, enter=enter)


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A cluster with one slurmd per host."""

    folder: Path
    hosts: tuple[Host, ...]

    @property
    def variables(self) -> dict[str, str]:
        return PROGRAMS | {"PATH": SEARCHED, "SLURM_CONF": str(self.folder / "slurm.conf"), "HOME": str(self.folder)}

    def become(self, *command: str) -> None:
        program = shutil.which(command[0], path=SEARCHED)
        assert program is not None
        os.chdir(self.folder)
        os.execve(program, command, self.variables)

    def run(self, *command: str, seconds: float = 60) -> Failure | None:
        """Run a command on the first host."""
        return run_at([on(self.hosts[0], self.hosts)], lambda place: self.become(*command), seconds)

    def start(self, daemons: RankProcesses) -> None:
        folder = self.folder
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=2" for host in self.hosts]
        conf = SLURM_CONF.format(first=self.hosts[0], folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(conf)
        # Named, or slurmd looks for what is mounted, which a host of a lab does not have.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")]
        first = on(self.hosts[0], self.hosts)
        munged = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge", *files]
        daemons.start(first, partial(self.become, *munged))
        assert eventually((folder / "munge").exists)
        daemons.start(first, partial(self.become, "slurmctld", "-D"))
        for host in self.hosts:
            (folder / host.name).mkdir()
            daemons.start(on(host, self.hosts), partial(self.become, "slurmd", "-D", "-N", host.name))


@pytest.fixture
def slurm(nothing_left: str) -> Iterator[Slurm]:
    # A short name: that of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with Lab(LabPlan(name=nothing_left, hosts=2)) as lab, RankProcesses() as daemons:
            cluster = Slurm(folder=folder, hosts=lab.hosts)
            cluster.start(daemons)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.program
@with_lab
@pytest.mark.timeout(180)
@pytest.mark.skipif(bool(NO_SLURM), reason=f"Slurm is not installed: {', '.join(NO_SLURM)}")
def test_a_batch_script_runs_on_two_nodes_of_slurm(slurm: Slurm, tmp_path: Path) -> None:
    job = fixed(program=(SCRIPT, str(tmp_path)), ranks_per_node=1, gpus=False)
    (slurm.folder / "gradsync.sbatch").write_text(slurm_script(job))
    failure = slurm.run("sbatch", "--wait", "gradsync.sbatch", seconds=150)
    logs = "\n".join(path.read_text() for path in slurm.folder.glob("*.log"))
    assert failure is None, logs
    assert_trained(tmp_path, [0, 1])


def _steps(run: Path) -> int:
    """The last step that the ranks have recorded."""
    return max((record.get("step", 0) for record in read_metrics(run)), default=0) if run.is_dir() else 0


@pytest.mark.program
@with_lab
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(NO_SLURM), reason=f"Slurm is not installed: {', '.join(NO_SLURM)}")
def test_elastic_ranks_under_slurm_go_on_when_one_is_killed(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    run, steps = tmp_path / "run", 600
    (tmp_path / "text").write_text("some words to learn " * 1000)
    options = {"run-folder": run, "data": tmp_path / "text", "model": "nano", "length": 16, "batch": 2, "steps": steps}
    words = [f"--{name}={value}" for name, value in options.items()]
    job = elastic(program=("-m", "gradsync", "train", *words), ranks_per_node=1)
    (slurm.folder / "gradsync.sbatch").write_text(slurm_script(job))

    def kill_a_rank() -> None:
        # In the middle of the run, the one on the second node.
        assert eventually(lambda: _steps(run) > 50, 120)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes(slurm.hosts[1].namespace)}
        (rank,) = [pid for pid, command in commands.items() if b"runpy" in command]
        os.kill(rank, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_a_rank)
        failure = slurm.run("sbatch", "--wait", "gradsync.sbatch", seconds=200)
        log = "\n".join(path.read_text() for path in slurm.folder.glob("gradsync-*.log"))
        assert failure is None, log
        killed.result()
    assert "the others go on, and it is started again" in log
    assert _steps(run) == steps
