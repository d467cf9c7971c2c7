"""``gradsync train``: a language model, data-parallel, with one command."""

import inspect
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import torch
import typer

from gradsync.base.environment import read_environment, times_restarted
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
)
from gradsync.tools.llm.settings import HEADINGS, RANKS, TrainOption, TrainSettings, option_of
from gradsync.tools.metrics.choose import require_packages

__all__ = ["train"]

# A rank that has nothing to add to an error lets rank 0 end first: its exit code is the one that tells.
SECONDS_FOR_RANK_0 = 3


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Which ranks to start, and where."""

    nproc: int | None = RANKS(None, "Ranks to start. Default: one per GPU, or per core up to 4.")
    max_restarts: int = RANKS(
        0, "After a failure, restart all ranks from the newest checkpoint, at most this many times."
    )
    cpu: bool = RANKS(False, "Do not use GPUs.")
    one_gpu: bool = RANKS(False, ONE_GPU_HELP)
    mps: bool = RANKS(False, MPS_HELP)
    elastic_ranks: int | None = RANKS(
        None, "With --elastic: ranks of all nodes at the start. Default: those of this node."
    )


def train(**given: Any) -> None:
    """Train a language model on several ranks, with gradient accumulation.

    Without options, it trains a small GPT on the source code of Python's standard library, on all cores of this
    machine. Under torchrun, mpirun or srun, it uses the ranks that the launcher has started.
    """
    launch = LaunchSettings(**{each.name: given.pop(each.name) for each in fields(LaunchSettings)})
    gpus = GpuChoice(one_gpu=launch.one_gpu, mps=launch.mps, cpu=launch.cpu)
    # A launcher that starts ranks again wants them to go on.
    given["resume"] = given["resume"] or times_restarted() > 0
    if given["resume"] and given["run_folder"] is None:
        raise ConfigurationError("--resume needs --run-folder, the folder of the run that goes on")
    arguments = sys.argv[1:]
    if given["run_folder"] is None:
        given["run_folder"] = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        arguments += ["--run-folder", str(given["run_folder"])]
    settings = TrainSettings(**given)
    if inside_a_launch():
        _be_rank(settings, launch.cpu)
    raise typer.Exit(_start_ranks(settings, launch, gpus, arguments))


def _options() -> Iterator[inspect.Parameter]:
    """The fields of both classes of settings, as parameters that typer understands."""
    for settings in (LaunchSettings, TrainSettings):
        hints = get_type_hints(settings)
        for each in fields(settings):
            option: TrainOption = each.metadata["option"]
            default = None if each.default is MISSING else each.default
            # Named also where typer would find the name: it would add the opposite of a switch.
            info = typer.Option(option_of(each.name, settings), help=option.help, rich_help_panel=option.heading)
            hint = hints[each.name]
            kind: Any = get_args(hint)[0] if NoneType in get_args(hint) else hint
            # Which words are accepted the settings check themselves.
            kind = str if get_origin(kind) is Literal else kind
            kind = Annotated[kind | None if default is None else kind, info]
            yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


train.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    sorted(_options(), key=lambda each: HEADINGS.index(each.annotation.__metadata__[0].rich_help_panel))
)


# -- the launcher -----------------------------------------------------------------------------------------------------


def _start_ranks(settings: TrainSettings, launch: LaunchSettings, gpus: GpuChoice, arguments: list[str]) -> int:
    """Run all ranks, and return the exit code."""
    ranks = gpus.default_ranks if launch.nproc is None else launch.nproc
    if ranks < 1:
        raise ConfigurationError(f"--nproc must be at least 1, got {ranks}")
    if too_many := gpus.too_many(ranks):
        raise ConfigurationError(f"{too_many}, or --cpu to use none")
    if launch.elastic_ranks is not None and not settings.elastic:
        raise ConfigurationError(
            f"--elastic-ranks {launch.elastic_ranks} says how many --elastic ranks there are: give both"
        )
    sharing, restarts = gpus.sharing(ranks), launch.max_restarts
    _check_early(settings, ranks)
    if settings.elastic:
        if sharing is not None:
            raise ConfigurationError("--one-gpu is for a fixed number of ranks: leave it out, or --elastic")
        return _run_elastic(settings, launch, arguments, ranks)
    if ranks == 1 and not restarts:
        return _run_rank(settings, launch.cpu)
    return run_ranks_of("gradsync", arguments, nproc=ranks, explained=(1, 2), max_restarts=restarts, sharing=sharing)


def _run_elastic(settings: TrainSettings, launch: LaunchSettings, arguments: list[str], ranks: int) -> int:
    if launch.max_restarts:
        raise ConfigurationError("--max-restarts starts all ranks again; --elastic replaces those that are lost")
    require_torchft()
    all_ranks = ranks if launch.elastic_ranks is None else launch.elastic_ranks
    return run_elastic_ranks_of("gradsync", arguments, nproc=ranks, ranks=all_ranks, min_ranks=settings.min_ranks)


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
    if settings.metrics is not None:
        require_packages(settings.metrics)
    with torch.device("meta"), refusing("--model"):
        build_model(settings.model, vocab_size=tokens.vocab_size, sequence_length=settings.sequence_length)


# -- a rank -----------------------------------------------------------------------------------------------------------


def _be_rank(settings: TrainSettings, on_cpu: bool) -> NoReturn:
    try:
        code = _run_rank(settings, on_cpu)
    except BaseException as error:
        report_exit(error, at=time.time(), then=say_goodbye)
        raise
    sys.stdout.flush()
    sys.stderr.flush()
    say_goodbye()
    # Not through the interpreter's end, where threads of a communicator may still want it and abort the process.
    os._exit(code)


def _run_rank(settings: TrainSettings, on_cpu: bool) -> int:
    from gradsync.tools.llm.run import run, run_elastic

    rank = read_environment().rank
    try:
        return (run_elastic if settings.elastic else run)(settings, cpu=on_cpu).exit_code
    except OSError as error:
        # A full disk, a folder that went away: no reason for a traceback.
        raise GradsyncError(str(error)) from error
    except (ConfigurationError, PeerFailedError) as error:
        # Bad input is the same everywhere, and rank 0 says it once; what failed on another rank alone that rank says.
        known = type(error) in (ConfigurationError, PeerFailedError, CommunicatorLostError)
        if rank > 0 and not has_launcher() and known:
            time.sleep(SECONDS_FOR_RANK_0)
            return 1
        raise
