"""``gradsync train``: a language model, data-parallel, with one command."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from gradsync.base.environment import read_environment
from gradsync.base.errors import CommunicatorLostError, ConfigurationError, GradsyncError, PeerFailedError
from gradsync.health.elastic import require_torchft
from gradsync.health.watch import say_goodbye
from gradsync.tools.cli.failure_message import has_launcher, refusing, report_exit
from gradsync.tools.cli.launching import (
    MPS_HELP,
    ONE_GPU_HELP,
    GpuChoice,
    inside_a_launch,
    run_elastic_ranks_of,
    run_ranks_of,
    times_restarted,
)
from gradsync.tools.llm.settings import TrainSettings

__all__ = ["train"]

# A rank that has nothing to add to an error lets rank 0 end first: its exit code is the one that tells.
SECONDS_FOR_RANK_0 = 3

# Options under the headings of the help.
HEADINGS = ("Model and data", "Batches and steps", "Optimization", "Ranks and communication", "Run folder")
MODEL, BATCH, LEARNING, WIRE, RUN = (partial(typer.Option, rich_help_panel=heading) for heading in HEADINGS)


def train(
    model: Annotated[str, MODEL(help="nano, tiny, mini, gpt2, hf:NAME, or a folder.")] = "tiny",
    data: Annotated[str, MODEL(help="stdlib, a text file, a folder, or hf:NAME.")] = "stdlib",
    tokenizer: Annotated[str | None, MODEL(help="A Hugging Face tokenizer. Default: bytes.")] = None,
    micro_batch: Annotated[int, BATCH("--batch", help="Sequences per micro-batch and rank.")] = 8,
    grad_accum: Annotated[int, BATCH(help="Micro-batches per step and rank.")] = 4,
    sequence_length: Annotated[int, BATCH("--length", help="Tokens per sequence.")] = 128,
    steps: Annotated[int | None, BATCH(help="Optimizer steps. Default: 130, unless --epochs is given.")] = None,
    epochs: Annotated[float | None, BATCH(help="Passes over the data (instead of --steps).")] = None,
    learning_rate: Annotated[float, LEARNING("--lr", help="Peak learning rate, after the warm-up.")] = 1e-3,
    warmup: Annotated[int, LEARNING(help="Steps of the warm-up; a cosine decay follows.")] = 20,
    weight_decay: Annotated[float, LEARNING(help="Weight decay (AdamW).")] = 0.1,
    clip: Annotated[float, LEARNING(help="Maximum norm of the gradient.")] = 1.0,
    precision: Annotated[str, LEARNING(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    seed: Annotated[int, LEARNING(help="Random seed of weights, data order and dropout.")] = 0,
    nproc: Annotated[int | None, WIRE(help="Ranks to start. Default: one per GPU, or per core up to 4.")] = None,
    max_restarts: Annotated[
        int, WIRE(help="After a failure, restart all ranks from the newest checkpoint, at most this many times.")
    ] = 0,
    elastic: Annotated[
        bool, WIRE("--elastic", help="Continue when ranks are lost, and let new ranks join (needs torchft).")
    ] = False,
    min_ranks: Annotated[int, WIRE(help="With --elastic: minimum number of ranks; with fewer, training waits.")] = 1,
    elastic_ranks: Annotated[
        int | None, WIRE(help="With --elastic: ranks of all nodes at the start. Default: those of this node.")
    ] = None,
    cpu: Annotated[bool, WIRE("--cpu", help="Do not use GPUs.")] = False,
    one_gpu: Annotated[bool, WIRE("--one-gpu", help=ONE_GPU_HELP)] = False,
    mps: Annotated[bool, WIRE("--mps", help=MPS_HELP)] = False,
    bucket_mb: Annotated[float | None, WIRE(help="Bucket size in MiB. Default: measured.")] = None,
    reduction: Annotated[
        str,
        WIRE(
            help="How gradients are sent: mean, bf16, fp16, int8, int4, sign, low-rank:4, top-k:0.01, auto, local:16."
        ),
    ] = "mean",
    shard_optimizer: Annotated[
        bool,
        WIRE("--shard-optimizer", help="Divide the update among ranks, and gather parameters during the next forward."),
    ] = False,
    overlap: Annotated[
        str | None, WIRE(help="Overlap communication with backward, next-forward, or auto (whichever is faster).")
    ] = None,
    on_bad_step: Annotated[
        str | None,
        WIRE(help="What to do if a rank's gradients are not finite: raise, skip or drop-rank."),
    ] = None,
    replica_check: Annotated[
        int | None, WIRE(help="Steps between comparisons of the replicas; a rank that differs is named.")
    ] = None,
    run_folder: Annotated[
        Path | None, RUN(help="Folder for metrics, checkpoints and the report. Default: runs/TIME.")
    ] = None,
    resume: Annotated[bool, RUN("--resume", help="Continue from the newest checkpoint in --run-folder.")] = False,
    checkpoint_every: Annotated[int, RUN(help="Steps between checkpoints.")] = 100,
    keep: Annotated[int, RUN(help="Number of checkpoints to keep.")] = 2,
    validate_every: Annotated[int, RUN(help="Steps between validations.")] = 50,
    tensorboard: Annotated[bool, RUN("--tensorboard", help="Also write TensorBoard events.")] = False,
) -> None:
    """Train a language model on several ranks, with gradient accumulation.

    Without options, it trains a small GPT on the source code of Python's standard library, on all cores of this
    machine. Under torchrun, mpirun or srun, it uses the ranks that the launcher has started.
    """
    chosen = dict(locals())
    ranks, on_cpu, restarts = chosen.pop("nproc"), chosen.pop("cpu"), chosen.pop("max_restarts")
    gpus = GpuChoice(one_gpu=chosen.pop("one_gpu"), mps=chosen.pop("mps"), cpu=on_cpu)
    del chosen["elastic_ranks"]
    # A launcher that starts ranks again wants them to go on.
    chosen["resume"] = resume = resume or times_restarted() > 0
    if resume and run_folder is None:
        raise ConfigurationError("--resume needs --run-folder, the folder of the run that goes on")
    if run_folder is None:
        chosen["run_folder"] = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    settings = TrainSettings(**chosen)
    if inside_a_launch():
        try:
            code = _run_rank(settings, on_cpu)
        except BaseException as error:
            report_exit(error, at=time.time(), then=say_goodbye)
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        say_goodbye()
        # Not through the interpreter's end, where threads of the wire may still want it and abort the process.
        os._exit(code)
    ranks = gpus.default_ranks if ranks is None else ranks
    if ranks < 1:
        raise ConfigurationError(f"--nproc must be at least 1, got {ranks}")
    if too_many := gpus.too_many(ranks):
        raise ConfigurationError(f"{too_many}, or --cpu to use none")
    if elastic_ranks is not None and not elastic:
        raise ConfigurationError(f"--elastic-ranks {elastic_ranks} says how many --elastic ranks there are: give both")
    sharing = gpus.sharing(ranks)
    _check_early(settings, ranks)
    arguments = [*sys.argv[1:], *([] if run_folder is not None else ["--run-folder", str(settings.run_folder)])]
    if elastic:
        if sharing is not None:
            raise ConfigurationError("--one-gpu is for a fixed number of ranks: leave it out, or --elastic")
        raise typer.Exit(_run_elastic(settings, arguments, ranks, elastic_ranks, restarts))
    if ranks == 1 and not restarts:
        raise typer.Exit(_run_rank(settings, on_cpu))
    raise typer.Exit(
        run_ranks_of("gradsync", arguments, nproc=ranks, explained=(1, 2), max_restarts=restarts, sharing=sharing)
    )


def _run_elastic(
    settings: TrainSettings, arguments: list[str], ranks: int, all_ranks: int | None, restarts: int
) -> int:
    if restarts:
        raise ConfigurationError("--max-restarts starts all ranks again; --elastic replaces those that are lost")
    require_torchft()
    return run_elastic_ranks_of(
        "gradsync",
        arguments,
        nproc=ranks,
        ranks=ranks if all_ranks is None else all_ranks,
        min_ranks=settings.min_ranks,
    )


def _check_early(settings: TrainSettings, ranks: int) -> None:
    """What can be found out before ranks are started is said once, and at once."""
    from gradsync.tools.llm.model import build_model
    from gradsync.tools.llm.tokens import Batches, BatchPlan, prepare_tokens

    with refusing("--data"):
        tokens = prepare_tokens(settings.data, tokenizer=settings.tokenizer)
    plan = BatchPlan(
        sequence_length=settings.sequence_length,
        # Of a run that goes on, the checkpoint says it; of an elastic one, its ranks.
        global_batch=1 if settings.resume or settings.elastic else settings.micro_batch * settings.grad_accum * ranks,
        micro_batch=settings.micro_batch,
        seed=settings.seed,
    )
    asked = f"--batch {settings.micro_batch} times --grad-accum {settings.grad_accum} times --nproc {ranks}"
    with refusing(f"{asked}, at --length {settings.sequence_length}"):
        Batches(tokens.split()[0], plan, 0, 1)
    with torch.device("meta"), refusing("--model"):
        build_model(settings.model, vocab_size=tokens.vocab_size, sequence_length=settings.sequence_length)


def _run_rank(settings: TrainSettings, on_cpu: bool) -> int:
    from gradsync.tools.llm.run import exit_code_of, run, run_elastic

    rank = read_environment().rank
    try:
        return exit_code_of((run_elastic if settings.elastic else run)(settings, cpu=on_cpu))
    except OSError as error:
        # A full disk, a folder that went away: no reason for a traceback.
        raise GradsyncError(str(error)) from error
    except (ConfigurationError, PeerFailedError) as error:
        # Bad input is the same everywhere, and rank 0 says it once; what failed on another rank alone that rank says.
        if (
            rank > 0
            and not has_launcher()
            and type(error) in (ConfigurationError, PeerFailedError, CommunicatorLostError)
        ):
            time.sleep(SECONDS_FOR_RANK_0)
            return 1
        raise
