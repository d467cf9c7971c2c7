"""Batch scripts and manifests: what the packages of Kubernetes and Kubeflow read, and what the page shows."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradsync.base.environment import DEFAULT_PORT
from gradsync.errors import ConfigurationError
from gradsync.tools.clusters import CHOSEN_PORTS, LIGHTHOUSE_PORT, ClusterJob, kubernetes_manifests, slurm_script
from tests.pages import blocks

yaml = pytest.importorskip("yaml")

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
