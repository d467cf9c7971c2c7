"""``gradsync launch``: a script on several nodes of a cluster, with a file that Slurm or Kubernetes reads."""

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.tools.clusters import ClusterJob, kubernetes_manifests, slurm_script

__all__ = ["SETTINGS", "launch"]

# What follows the script is the script's, whatever it looks like.
SETTINGS = {"allow_interspersed_args": False}
# By cluster: what writes the file, the file's suffix, and how it is submitted.
CLUSTERS = {
    "slurm": (slurm_script, ".sbatch", ["sbatch"]),
    "kubernetes": (kubernetes_manifests, ".yaml", ["kubectl", "apply", "-f"]),
}


def launch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script and its arguments.", show_default=False),
    ],
    on: Annotated[str, typer.Option(help=f"The cluster: {' or '.join(CLUSTERS)}.", show_default=False)],
    nproc: Annotated[int, typer.Option(help="Ranks per node.", show_default=False)],
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module name, as for python -m.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Ask for no GPUs. Default: one per rank.")] = False,
    cores: Annotated[int, typer.Option(help="CPU cores per rank.")] = 1,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Ranks that may be lost and replaced, for -m gradsync train.")
    ] = False,
    min_ranks: Annotated[int, typer.Option(help="With --elastic: minimum number of ranks.")] = 1,
    name: Annotated[str, typer.Option(help="Name of the job, and of the file.")] = "gradsync",
    image: Annotated[str, typer.Option(help="Kubernetes: container image with gradsync and the script.")] = "gradsync",
    output: Annotated[Path, typer.Option(help="Folder for the file.")] = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the file, and do not submit it.")] = False,
) -> None:
    """Run a script on several nodes: write a batch script for Slurm, or manifests for Kubernetes, and submit them.

    The ranks are started by torchrun, so the script may be any that torchrun can start.
    """
    if on not in CLUSTERS:
        raise ConfigurationError(f"--on must be {' or '.join(CLUSTERS)}, got {on!r}")
    job = ClusterJob(
        name=name,
        program=(*(["-m"] if module else []), *command),
        nodes=nodes,
        ranks_per_node=nproc,
        cores=cores,
        gpus=not cpu,
        elastic=elastic,
        min_ranks=min_ranks,
        image=image,
    )
    raise typer.Exit(_write(job, on, output, dry_run))


def _write(job: ClusterJob, on: str, folder: Path, dry_run: bool) -> int:
    write, suffix, submit = CLUSTERS[on]
    path = folder / f"{job.name}{suffix}"
    path.write_text(write(job), encoding="utf-8")
    if dry_run:
        print(f"{path} is written. Submit it with: {' '.join(submit)} {path}")
        return 0
    try:
        return subprocess.run([*submit, str(path)], check=False).returncode
    except FileNotFoundError as error:
        raise GradsyncError(f"{path} is written, but there is no {submit[0]} here to submit it with") from error
