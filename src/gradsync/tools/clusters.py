"""Files that start ranks on a cluster: a batch script for Slurm, manifests for Kubernetes.

Fixed ranks are torchrun's, one agent per node. Elastic ranks are those of ``gradsync train --elastic``: one launcher
per node replaces its own ranks, and torchft's lighthouse, which has a place of its own, says who takes part.
"""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from gradsync.base.environment import DEFAULT_PORT, FIRST_JOB_PORT, JOB_PORTS
from gradsync.base.errors import ConfigurationError

__all__ = ["ClusterJob", "kubernetes_manifests", "slurm_script"]

LIGHTHOUSE_PORT = 29510
# Which Linux gives to sockets that ask for no port: those of Gloo, NCCL and gradsync's watch.
CHOSEN_PORTS = (32768, 60999)
# Seconds between the signal and the end: for a step, and a checkpoint.
GRACE_SECONDS = 120
# As gradsync's own launcher starts it: how long it waits for a rank that is alive, and when a silent one is lost.
LIGHTHOUSE_OPTIONS = "--join_timeout_ms 10000 --heartbeat_timeout_ms 2000 --quorum_tick_ms 50"
# Of Kubernetes: a name that may be one of hosts. Its objects get longer names, of at most 63 characters.
NAME, LONGEST_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), 45


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """What to run, and on how much of a cluster.

    ``program`` is what follows ``torchrun``: a script, or ``-m`` and a module, and its arguments. ``cores`` are per
    rank.
    """

    name: str
    program: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    cores: int = 1
    gpus: bool = True
    elastic: bool = False
    min_ranks: int = 1
    image: str = "gradsync"

    def __post_init__(self) -> None:
        for option in ("nodes", "ranks_per_node", "cores", "min_ranks"):
            if getattr(self, option) < 1:
                name = {"ranks_per_node": "nproc"}.get(option, option.replace("_", "-"))
                raise ConfigurationError(f"--{name} must be at least 1, got {getattr(self, option)}")
        if NAME.fullmatch(self.name) is None or len(self.name) > LONGEST_NAME:
            raise ConfigurationError(
                f"--name must be at most {LONGEST_NAME} small letters, digits and hyphens, with a letter first, and no "
                f"hyphen last, since it becomes a part of the names of hosts; got {self.name!r}"
            )
        if self.elastic and self.program[:3] != ("-m", "gradsync", "train"):
            raise ConfigurationError(
                "--elastic is for `gradsync launch --elastic … -m gradsync train …`, whose launcher replaces lost "
                f"ranks; what is to run here is {shlex.join(self.program)!r}"
            )
        if self.elastic and self.gpus:
            raise ConfigurationError("elastic ranks are connected by Gloo, not by NCCL: give --cpu with --elastic")
        if self.elastic and self.min_ranks > self.ranks:
            raise ConfigurationError(f"--min-ranks is {self.min_ranks}, but there are only {self.ranks} ranks")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def elastic_command(self) -> list[str]:
        options = [f"--nproc={self.ranks_per_node}", f"--elastic-ranks={self.ranks}", f"--min-ranks={self.min_ranks}"]
        return ["gradsync", "train", "--elastic", "--cpu", *options, *self.program[3:]]

    def __str__(self) -> str:
        return f"{self.nodes} nodes with {self.ranks_per_node} {'elastic ' if self.elastic else ''}ranks each"


# -- Slurm ------------------------------------------------------------------------------------------------------------


def slurm_script(job: ClusterJob) -> str:
    """A script for ``sbatch``."""
    directives = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cores * job.ranks_per_node,
        **({"gpus-per-node": job.ranks_per_node} if job.gpus else {}),
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{GRACE_SECONDS}",
    }
    # When a node is lost, the whole job is queued again, or goes on without it.
    lines = [f"--{name}={value}" for name, value in directives.items()] + ["--no-kill" if job.elastic else "--requeue"]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job}. The ranks get SIGTERM {GRACE_SECONDS} seconds before the job's time is over.",
            *(f"#SBATCH {line}" for line in lines),
            _SLURM_START.format(cores=job.cores, first=FIRST_JOB_PORT, count=JOB_PORTS),
            _slurm_elastic(job) if job.elastic else _slurm_fixed(job),
        ]
    )


# mapfile reads all that scontrol writes: with `head -n 1` in its place it could fail by SIGPIPE.
_SLURM_START = """\
set -euo pipefail

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Another one for every job, as jobs may share a node.
port=$(({first} + SLURM_JOB_ID % {count}))
export OMP_NUM_THREADS={cores}
"""


def _slurm_fixed(job: ClusterJob) -> str:
    return f"""\
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    torchrun --nnodes={job.nodes} --nproc-per-node={job.ranks_per_node} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${{hosts[0]}}:$port" \\
    {shlex.join(job.program)}
"""


def _slurm_elastic(job: ClusterJob) -> str:
    # With srun's variables the launcher would take itself for a rank.
    return f"""\
# The lighthouse says which ranks take part. By default it would log every question.
RUST_LOG=warn torchft_lighthouse --min_replicas {job.min_ranks} {LIGHTHOUSE_OPTIONS} --bind "0.0.0.0:$port" &
trap "kill $!" EXIT
export TORCHFT_LIGHTHOUSE="http://${{hosts[0]}}:$port"
# On every node a launcher that starts the node's ranks again when they are lost. Lost nodes do not end the others.
srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    env --unset=SLURM_PROCID {shlex.join(job.elastic_command)}
"""


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def kubernetes_manifests(job: ClusterJob) -> str:
    """Manifests for ``kubectl apply``."""
    manifests = [_job, _lighthouse, _lighthouse_service] if job.elastic else [_train_job]
    return "---\n".join([f"# {job}.\n", *(manifest(job) for manifest in [*manifests, _network_policy])])


def _command(words: Iterable[str]) -> str:
    # Kubernetes would put variables in the place of $(NAME).
    return json.dumps([word.replace("$(", "$$(") for word in words], ensure_ascii=False)


def _resources(job: ClusterJob) -> str:
    gpus = {"limits": {"nvidia.com/gpu": str(job.ranks_per_node)}} if job.gpus else {}
    return json.dumps({"requests": {"cpu": str(job.cores * job.ranks_per_node)}, **gpus})


def _train_job(job: ClusterJob) -> str:
    # Kubeflow tells torchrun by variables how many nodes there are, which one this is, and where they meet.
    return f"""\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: {json.dumps(job.image)}
    numNodes: {job.nodes}
    numProcPerNode: {job.ranks_per_node}
    command: {_command(["torchrun", *job.program])}
    env:
      - {{name: OMP_NUM_THREADS, value: "{job.cores}"}}
    resourcesPerNode: {_resources(job)}
"""


def _job(job: ClusterJob) -> str:
    return f"""\
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.name}
spec:
  completions: {job.nodes}
  parallelism: {job.nodes}
  completionMode: Indexed
  # A pod that is lost is replaced while the others go on.
  backoffLimitPerIndex: 100
  # When the ranks of one pod have finished, the training has.
  successPolicy:
    rules:
      - succeededCount: 1
  template:
    metadata:
      labels: {{gradsync/job: {job.name}, gradsync/part: ranks}}
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: {GRACE_SECONDS}
      containers:
        - name: ranks
          image: {json.dumps(job.image)}
          command: {_command(job.elastic_command)}
          env:
            - {{name: OMP_NUM_THREADS, value: "{job.cores}"}}
            - {{name: TORCHFT_LIGHTHOUSE, value: "http://{job.name}-lighthouse:{LIGHTHOUSE_PORT}"}}
          resources: {_resources(job)}
"""


def _lighthouse(job: ClusterJob) -> str:
    command = f"torchft_lighthouse --min_replicas {job.min_ranks} {LIGHTHOUSE_OPTIONS} --bind 0.0.0.0:{LIGHTHOUSE_PORT}"
    return f"""\
# Says which ranks take part. It outlives the job: kubectl delete removes both.
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {job.name}-lighthouse
spec:
  replicas: 1
  selector:
    matchLabels: {{gradsync/job: {job.name}, gradsync/part: lighthouse}}
  template:
    metadata:
      labels: {{gradsync/job: {job.name}, gradsync/part: lighthouse}}
    spec:
      containers:
        - name: lighthouse
          image: {json.dumps(job.image)}
          command: {_command(command.split())}
          env:
            - {{name: RUST_LOG, value: warn}}
          readinessProbe:
            tcpSocket: {{port: {LIGHTHOUSE_PORT}}}
"""


def _lighthouse_service(job: ClusterJob) -> str:
    return f"""\
apiVersion: v1
kind: Service
metadata:
  name: {job.name}-lighthouse
spec:
  selector: {{gradsync/job: {job.name}, gradsync/part: lighthouse}}
  ports:
    - port: {LIGHTHOUSE_PORT}
"""


def _network_policy(job: ClusterJob) -> str:
    # Kubeflow's pods have the label of their JobSet.
    label = f"gradsync/job: {job.name}" if job.elastic else f"jobset.sigs.k8s.io/jobset-name: {job.name}"
    meeting, what = (LIGHTHOUSE_PORT, "The lighthouse") if job.elastic else (DEFAULT_PORT, "The rendezvous of torchrun")
    return f"""\
# Only pods of this job reach each other: torch's stores, Gloo and NCCL have no authentication.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {job.name}
spec:
  podSelector:
    matchLabels: {{{label}}}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels: {{{label}}}
      ports:
        # {what}
        - {{protocol: TCP, port: {meeting}}}
        # Gloo, NCCL, stores and gradsync's watch, at ports that the kernel chooses
        - {{protocol: TCP, port: {CHOSEN_PORTS[0]}, endPort: {CHOSEN_PORTS[1]}}}
"""
