"""One process of a script from first line to last: observed, ended as Python would end it, and accounted for."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from gradsync.base.environment import ProcessEnvironment, read_environment
from gradsync.base.errors import ConfigurationError
from gradsync.health.watch import say_goodbye
from gradsync.health.watch.exit_causes import exit_status
from gradsync.observe.recording import close_recorders
from gradsync.observe.recording.attach import VARIABLE
from gradsync.tools.run.account import Account, account_path, find_accounts, read_account, write_account
from gradsync.tools.run.children import Settings, begin_with_children, say_if_ranks_are_started
from gradsync.tools.run.script import Script, leave_as_python_would

__all__ = ["all_accounts", "common_folder", "end_rank", "run_rank"]

# Ranks end at about the same time; what one of them does after the others is not worth more.
SECONDS_FOR_OTHERS = 5.0
TICK = 0.05


def run_rank(
    script: Script, *, keep: bool, folder: Path, on_end: Callable[[BaseException | None], object] = lambda ended: None
) -> tuple[Account | None, BaseException | None]:
    """Run the script here. Returns what was counted and written to ``folder``, and how the script ended.

    ``on_end`` is called with that before any other rank can hear of it. There is no account of a script that raised:
    its own words are to be the last.
    """
    # Of gradsync's wrappers, and of processes that the script starts; where the user wants none, or elsewhere, there.
    os.environ.setdefault(VARIABLE, str(folder))
    settings = Settings(keep=keep, folder=folder)
    running = begin_with_children(settings)
    if read_environment().launcher != "none":
        say_if_ranks_are_started()
    # What an earlier run has left must not be taken for this one's.
    account_path(folder, running.account().rank).unlink(missing_ok=True)
    ended: BaseException | None = None
    try:
        script_to_run = script.load()
    except ConfigurationError:
        raise
    except BaseException as error:
        on_end(error)
        return None, error
    try:
        script_to_run()
    except (SystemExit, KeyboardInterrupt) as error:
        ended = error
        on_end(error)
        if isinstance(error, SystemExit) and exit_status(error):
            # What is left to do, such as threads to be joined, may take long.
            say_goodbye(error)
    except BaseException as error:
        on_end(error)
        # Others wait for this rank: they are to hear of the error, and not only that it has ended.
        say_goodbye(error)
        # Now, and not at the end of the process, when the folder may be gone.
        close_recorders()
        return None, error
    if ended is None:
        on_end(None)
    account = running.account()
    # Of a process that only starts others they tell, the first by the same number.
    if account.wrappers or not account_path(folder, account.rank).exists():
        write_account(folder, account)
    close_recorders()
    return account, ended


def end_rank(ended: BaseException | None) -> NoReturn:
    """With the script's own exit code and traceback."""
    if ended is not None:
        leave_as_python_would(ended)
    raise SystemExit(0)


@contextmanager
def common_folder(place: ProcessEnvironment) -> Iterator[Path]:
    """A folder for all ranks that one launcher has started on this machine: it is the parent of each. Rank 0 removes it
    when it has read what is there; so does a rank that fails, which ends all of them."""
    name = f"gradsync-run-{os.getuid()}-{os.getppid()}-{place.master_port}"
    folder = Path(tempfile.gettempdir()) / name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(f"{folder} belongs to somebody else: name a folder of your own with --record")
    mine = folder / f"began-{place.rank}"
    mine.touch()
    failed = True
    try:
        yield folder
        failed = False
    finally:
        # What this rank began in is gone if rank 0 has not waited for it: then the folder was made anew, by this rank.
        if failed or place.rank == 0 or not mine.exists():
            shutil.rmtree(folder, ignore_errors=True)


def all_accounts(folder: Path, ranks: int) -> list[Account]:
    """Those of so many ranks at least, which all write to the folder; of a rank that is late, none."""
    deadline = time.monotonic() + SECONDS_FOR_OTHERS
    while len(find_accounts(folder)) < ranks and time.monotonic() < deadline:
        time.sleep(TICK)
    return [read_account(path) for path in find_accounts(folder)]
