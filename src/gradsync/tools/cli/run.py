"""``gradsync run SCRIPT …``: an unchanged DDP or Accelerate script on gradsync's classes, or only watched."""

import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError, PeerFailedError
from gradsync.observe.explain import explain_recordings
from gradsync.observe.recording import find_recordings, read_models
from gradsync.tools.cli.failure_message import FAILED, exit_statement_of, write_exit_statement
from gradsync.tools.cli.launching import MPS_HELP, ONE_GPU_HELP, GpuChoice, inside_a_launch, run_ranks_of
from gradsync.tools.run.account import Account, find_accounts, read_account, summarize
from gradsync.tools.run.script import UserScript, all_accounts, common_folder, end_rank, run_rank, traceback_of

__all__ = ["SETTINGS", "run"]

# What follows the script is the script's, whatever it looks like.
SETTINGS = {"allow_interspersed_args": False}
# Of errors that nobody catches: torch's, which names the rank, and that of our own command line.
USUAL_HOOKS = ("torch.", "typer.")


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script and its arguments.", show_default=False),
    ],
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks to start: by default one per GPU, or per core up to 4. 0: the script starts them."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep torch's and Accelerate's own classes, and only observe them.")
    ] = False,
    record: Annotated[Path | None, typer.Option(help="Save the recording in this folder.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module name, as for python -m.")] = False,
    one_gpu: Annotated[bool, typer.Option("--one-gpu", help=ONE_GPU_HELP)] = False,
    mps: Annotated[bool, typer.Option("--mps", help=MPS_HELP)] = False,
    accounts: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a DDP or Accelerate script unchanged on gradsync, and report where the time went.

    For the script, torch's DistributedDataParallel and Accelerate's Accelerator are replaced by gradsync's classes. It
    runs on ranks of this machine. Under torchrun, mpirun or srun, it uses the ranks that the launcher has started.
    """
    script = UserScript(target=command[0], arguments=tuple(command[1:]), is_module=module)
    script.require()
    if accounts is not None:
        # The launcher of this rank prints the summary.
        shown: list[bool] = []
        ended = run_rank(
            script, keep=keep, folder=accounts, on_end=lambda error: shown.append(_report_to_launcher(error))
        )[1]
        if isinstance(ended, Exception) and any(shown):
            raise typer.Exit(FAILED)
        end_rank(ended)
    if inside_a_launch():
        if nproc is not None:
            raise ConfigurationError(
                f"--nproc {nproc} was given, but torchrun, mpirun or srun has started this process as one of its "
                "ranks. Leave their number to it"
            )
        _run_here(script, keep, record)
    gpus = GpuChoice(one_gpu=one_gpu, mps=mps)
    ranks = gpus.default_ranks if nproc is None else nproc
    if ranks < 0:
        raise ConfigurationError(f"--nproc must be at least 0, got {ranks}")
    if ranks == 0 and one_gpu:
        raise ConfigurationError("--one-gpu is for ranks that are started here: it does not go with --nproc 0")
    sharing = gpus.sharing(ranks)
    if too_many := gpus.too_many(ranks):
        # Not refused: what the script does with GPUs is not known.
        print(f"gradsync: warning: if the script wants a GPU per rank: {too_many}", file=sys.stderr, flush=True)
    if ranks == 0:
        _run_here(script, keep, record)
    with _folder(record) as folder:
        options = [*(["--keep"] if keep else []), "--accounts", str(folder)]
        code = run_ranks_of("gradsync", ["run", *options, *script.words], nproc=ranks, sharing=sharing)
        _print_summary(script, folder, [read_account(path) for path in find_accounts(folder)])
    raise typer.Exit(code)


def _report_to_launcher(ended: BaseException | None) -> bool:
    """Returns whether it shows how the script ended: the error of the rank that failed first, and a line for each
    other one."""
    at, is_printed = time.time(), _prints_its_errors()
    if not isinstance(ended, Exception):
        # Python itself shows what is neither an error nor an exit: KeyboardInterrupt, asyncio.CancelledError.
        is_printed |= not (ended is None or isinstance(ended, SystemExit))
        return write_exit_statement(exit_statement_of(ended, at=at, is_printed=is_printed))
    # Where a script was when another rank failed does not explain the failure.
    has_trace = not isinstance(ended, PeerFailedError)
    trace = traceback.format_exception(ended.with_traceback(traceback_of(ended))) if has_trace else []
    record = exit_statement_of(ended, at=at, trace="".join(trace), is_printed=is_printed)
    return write_exit_statement(replace(record, code=FAILED)) and not is_printed


def _prints_its_errors() -> bool:
    """A script with an excepthook of its own has it called; a rank that is alone needs no name in front."""
    # Of a hook that was made by exec() nobody knows the module.
    module = str(getattr(sys.excepthook, "__module__", None))
    has_own_hook = sys.excepthook is not sys.__excepthook__ and not module.startswith(USUAL_HOOKS)
    return has_own_hook or read_environment().world_size == 1


def _run_here(script: UserScript, keep: bool, record: Path | None) -> NoReturn:
    """Run the script in this process: a rank of a launcher, or one that starts ranks. Rank 0 prints the summary."""
    place = read_environment()
    common = record is not None or (place.launcher != "none" and place.local_world_size == place.world_size)
    with _folder(record) if record is not None or not common else common_folder(place) as folder:
        account, ended = run_rank(script, keep=keep, folder=folder)
        if account is None:
            end_rank(ended)
        if account.rank == 0:
            # A script that is a rank itself and has started others, as Lightning's launcher does, has them here.
            expected = account.world_size if common or account.wrappers else 1
            _print_summary(script, folder, all_accounts(folder, expected))
    end_rank(ended)


@contextmanager
def _folder(record: Path | None) -> Iterator[Path]:
    if record is not None:
        try:
            record.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--record {record} cannot be made a folder: {error}") from error
        if find_accounts(record) or find_recordings(record):
            raise ConfigurationError(f"--record {record} holds the recording of another run: give every run its own")
        yield record.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="gradsync-run-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _print_summary(script: UserScript, folder: Path, accounts: list[Account]) -> None:
    """Print the summary beside what the script writes, which may be read by another program."""
    if not accounts:
        # It failed, and has printed why.
        return
    explained: list[str] = []
    # Nothing where recordings of gradsync's wrappers make no whole: of too few steps, or of ranks that write elsewhere.
    with suppress(ConfigurationError):
        explained = [line for each in read_models(folder) for line in ("", *explain_recordings(each).lines())]
    for line in summarize(accounts, str(script), times=not explained):
        print(f"gradsync: {line}", file=sys.stderr)
    for line in explained:
        print(line, file=sys.stderr)
    sys.stderr.flush()
