"""One process of a script from its first line to its last: watched, ended as Python would end it, accounted for."""

import time
from pathlib import Path
from typing import NoReturn

from gradsync.running.account import Account, account_path, find_accounts, read_account, write_account
from gradsync.running.children import Settings, begin_with_children
from gradsync.running.script import Script, leave_as_python_would

__all__ = ["all_accounts", "run_rank"]

# Ranks end at about the same time; what one of them does after the others is not worth more.
SECONDS_FOR_OTHERS = 5.0
TICK = 0.05


def run_rank(script: Script, *, keep: bool, folder: Path) -> tuple[Account | None, BaseException | None]:
    """Run the script here. Returns what was counted and written to ``folder``, and how the script ended.

    There is no account of a script that raised: its own words are to be the last.
    """
    settings = Settings(keep=keep, folder=folder)
    running = begin_with_children(settings)
    # What an earlier run has left must not be taken for this one's.
    account_path(folder, running.account().rank).unlink(missing_ok=True)
    ended: BaseException | None = None
    try:
        script.run()
    except (SystemExit, KeyboardInterrupt) as error:
        ended = error
    except BaseException as error:
        return None, error
    account = running.account()
    write_account(folder, account)
    return account, ended


def end_rank(ended: BaseException | None) -> NoReturn:
    """With the script's own exit code and traceback."""
    if ended is not None:
        leave_as_python_would(ended)
    raise SystemExit(0)


def all_accounts(folder: Path, own: Account) -> list[Account]:
    """Those of all ranks that write to the folder, which other hosts may not; of a rank that is late, none."""
    deadline = time.monotonic() + SECONDS_FOR_OTHERS
    while len(find_accounts(folder)) < own.world_size and time.monotonic() < deadline:
        time.sleep(TICK)
    return [read_account(path) for path in find_accounts(folder)]
