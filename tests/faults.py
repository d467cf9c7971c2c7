"""Ranks that fail at random moments, in their true times: ``make faults ARGS="--seeds 20"``.

A seed draws for every kind of fault how many ranks there are (2, 3 or 4), on one host or on two (namespaces with a link
between them, which needs root), whose turn it is, and when. What must be true of each kind:

===================  ==========================================================================================
kill -9, os._exit    all others raise within a second, and name the rank
exception            the same, wherever in the loop: data, forward, loss, backward, optimizer
SIGSTOP, cut link    warned about after 5 s, an error at the group's timeout, a second more or less, named
pause                SIGSTOP for 10 s, then SIGCONT: the parameters at the end have the bits of a run without
link down and up     for 3 s: the same
===================  ==========================================================================================
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradsync.lab import Lab, LabPlan
from tests.faulty import PLACES, STEPS, Fault, Host
from tests.scripts import free_port
from tests.zygote import Forked, fork

__all__ = ["KINDS", "Times", "check", "draw", "live_through", "undisturbed"]

ENDINGS = ("kill -9", "os._exit", "exception")
SILENCES = ("SIGSTOP", "cut link")
HARMLESS = ("pause", "link down and up")
KINDS = (*ENDINGS, *SILENCES, *HARMLESS)
LINKS = ("cut link", "link down and up")
# Beyond which a rank is stuck.
PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """In seconds: when a rank is warned about, the timeout of the group, and how long pauses are."""

    warned: float = 5.0
    timeout: float = 9.0
    stopped: float = 10.0
    cut: float = 3.0
    noticed: float = 1.0
    off: float = 1.0


@dataclass(kw_only=True)
class Outcome:
    """What came of a fault that struck ``at``, by rank."""

    at: float
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    output: str = ""


def draw(kind: str, seed: int, times: Times, *, hosts: tuple[int, ...] = (1, 2)) -> Fault:
    chance = random.Random(f"{kind} {seed}")
    ranks = chance.choice([2, 3, 4])
    return Fault(
        kind=kind,
        ranks=ranks,
        hosts=2 if kind in LINKS else chance.choice(hosts),
        victim=chance.randrange(ranks),
        step=chance.randrange(3, STEPS // 2),
        after=chance.uniform(0.0, 0.02),
        place=chance.choice(PLACES) if kind == "exception" else "",
        timeout=times.timeout if kind in SILENCES else 60.0,
        warned=times.warned,
    )


def live_through(fault: Fault, folder: Path, times: Times) -> Outcome:
    """Run the training of ``fault``, and do what its ranks cannot do themselves."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(LabPlan(name=f"faults{os.getpid()}", hosts=2))) if fault.hosts == 2 else None
        log = stack.enter_context(tempfile.TemporaryFile())
        ranks = list(_start(fault, folder, lab, log))
        for rank in ranks:
            stack.callback(rank.kill_all)
        at = _disturb(fault, folder, lab, ranks, times) if fault.kind != "none" else 0.0
        deadline = time.monotonic() + PATIENCE
        waited_for = [rank for number, rank in enumerate(ranks) if fault.kind != "SIGSTOP" or number != fault.victim]
        for rank in waited_for:
            with contextlib.suppress(Exception):
                rank.wait(max(0.1, deadline - time.monotonic()))
        outcome = Outcome(at=at, output=os.pread(log.fileno(), 20_000, 0).decode(errors="replace"))
        for number in range(fault.ranks):
            path = folder / f"rank-{number}"
            if path.exists():
                outcome.ranks[number] = json.loads(path.read_text())
    return outcome


def _start(fault: Fault, folder: Path, lab: Lab | None, log: Any) -> Iterator[Forked]:
    hosts = [Host(addresses={})]
    meeting = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if lab is not None:
        addresses = {host.name: host.address for host in lab.hosts}
        hosts = [Host(namespace=host.namespace, name=host.name, addresses=addresses) for host in lab.hosts]
        meeting = {"MASTER_ADDR": lab.hosts[0].address, "GLOO_SOCKET_IFNAME": lab.hosts[0].interface}
    meeting |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(fault.ranks), "OMP_NUM_THREADS": "1"}
    for rank in range(fault.ranks):
        variables = {**os.environ, **meeting, "RANK": str(rank)}
        host = hosts[rank * len(hosts) // fault.ranks]
        yield fork("tests.faulty:train", fault, folder, host, output=log, variables=variables)


def _disturb(fault: Fault, folder: Path, lab: Lab | None, ranks: list[Forked], times: Times) -> float:
    """When the fault struck."""
    deadline, mark = time.monotonic() + PATIENCE, folder / "struck"
    while not mark.exists():
        if time.monotonic() > deadline or any(rank.poll() for rank in ranks):
            return 0.0
        time.sleep(0.001)
    at = float(mark.read_text())
    if fault.kind == "pause":
        time.sleep(times.stopped)
        ranks[fault.victim].send_signal(signal.SIGCONT)
    if fault.kind in LINKS:
        assert lab is not None
        at = time.monotonic()
        lab.cut(1)
        if fault.kind == "link down and up":
            time.sleep(times.cut)
            lab.heal(1)
    return at


def undisturbed(fault: Fault, folder: Path, times: Times) -> str:
    """The parameters at the end of the same training, without the fault."""
    outcome = live_through(replace(fault, kind="none"), folder, times)
    (digest,) = {each["digest"] for each in outcome.ranks.values()}
    return str(digest)


def check(fault: Fault, outcome: Outcome, times: Times, expected: str = "") -> list[float]:
    """The seconds after which others raised. AssertionError if something was not as it must be."""
    told = f"{fault}: {json.dumps(outcome.ranks)}\n{outcome.output[-3000:]}"
    assert outcome.at, told
    if fault.kind in HARMLESS:
        assert {each.get("digest") for each in outcome.ranks.values()} == {expected}, told
        assert len(outcome.ranks) == fault.ranks, told
        return [0.0]
    seconds = []
    for rank in range(fault.ranks):
        if rank == fault.victim and fault.kind != "cut link":
            continue
        each = outcome.ranks.get(rank)
        assert each is not None, f"rank {rank} is stuck, or has ended without a word. {told}"
        # Of a backward that raised the others hear in the ballot, and their wire is whole.
        expected_error = "PeerFailedError" if fault.place == "backward" else "WireLostError"
        assert each.get("error") == expected_error, f"rank {rank}: {told}"
        lost = _lost(fault, rank)
        named = any(re.search(rf"\brank {other}\b", each["said"]) for other in lost)
        assert named, f"rank {rank} names none of {lost}: {told}"
        seconds.append(each["at"] - outcome.at)
    if fault.kind in ENDINGS:
        assert max(seconds) <= times.noticed, f"{seconds}: {told}"
        return seconds
    assert all(abs(each - times.timeout) <= times.off for each in seconds), f"{seconds}: {told}"
    warnings = [
        at - outcome.at for each in outcome.ranks.values() for at, line in each["heard"] if "error only after" in line
    ]
    assert warnings, f"nobody was warned. {told}"
    assert abs(min(warnings) - times.warned) <= 2 * times.off, f"warned after {warnings} s: {told}"
    return seconds


def _lost(fault: Fault, rank: int) -> list[int]:
    """Who may be named by ``rank``."""
    if fault.kind != "cut link":
        return [fault.victim]
    return [other for other in range(fault.ranks) if 2 * other // fault.ranks != 2 * rank // fault.ranks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2] if os.geteuid() == 0 else [1], choices=[1, 2])
    options = parser.parse_args()
    times, failed, rows, known = Times(), 0, [], dict[tuple[int, int], str]()
    with tempfile.TemporaryDirectory() as name:
        for kind in [each for each in options.kinds if each not in LINKS or 2 in options.hosts]:
            seconds, bad = list[float](), 0
            for seed in range(options.first, options.first + options.seeds):
                fault = draw(kind, seed, times, hosts=tuple(options.hosts))
                # Where the hosts are tells the order in which sums are made.
                place = fault.ranks, fault.hosts
                if kind in HARMLESS and place not in known:
                    known[place] = undisturbed(fault, Path(name) / f"undisturbed-{len(known)}", times)
                try:
                    outcome = live_through(fault, Path(name) / f"{kind} {seed}".replace(" ", "-"), times)
                    seconds += check(fault, outcome, times, known.get(place, ""))
                except AssertionError as error:
                    bad += 1
                    print(f"seed {seed} FAILED: {error}", flush=True)
            failed += bad
            most = f"{max(seconds):.2f}" if seconds else "-"
            median = f"{statistics.median(seconds):.2f}" if seconds else "-"
            rows.append(f"{kind:18s} {options.seeds - bad:4d} of {options.seeds:<4d} {median:>8s} {most:>8s}")
            print(rows[-1], flush=True)
    print(f"\n{'':18s} as it must be   median s   most s", *rows, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
