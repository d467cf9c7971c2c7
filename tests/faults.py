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

``python -m tests.faults --device cuda --seeds 5`` does it with three NCCL ranks that share a GPU, where the host does
not wait for collectives: the device does. What must be true there:

===================  ==========================================================================================
kill -9, os._exit    all others raise within a second, and name the rank, wherever their host waits for the device
raise in …           the same, in forward, backward and optimizer
SIGSTOP              warned about after 5 s, named and ended by the group's timeout and 3 s; the stopped rank ends with
                     an error when it goes on
survived             an error in backward that is caught, and NaN with each ``on_bad_step``: named within a second, and
                     all replicas stay equal from window to window
===================  ==========================================================================================

Several trials run at once, none begins after ``--seconds``, and every rank has a limit.
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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradsync.lab import Lab, LabPlan
from gradsync.tools.lab.gpu import SharedGpuPlan
from tests.faulty import PLACES, STEPS, SURVIVED, WAITS, Fault, Host
from tests.scripts import free_port
from tests.zygote import Forked, fork

__all__ = [
    "CUDA_KINDS",
    "KINDS",
    "Times",
    "check",
    "check_survived",
    "draw",
    "live_through",
    "survive",
    "undisturbed",
]

ENDINGS = ("kill -9", "os._exit", "exception")
SILENCES = ("SIGSTOP", "cut link")
HARMLESS = ("pause", "link down and up")
KINDS = (*ENDINGS, *SILENCES, *HARMLESS)
LINKS = ("cut link", "link down and up")
RAISED = ("raise in forward", "raise in backward", "raise in optimizer")
CUDA_KINDS = ("kill -9", "os._exit", *RAISED, "SIGSTOP")
CUDA_RANKS = 3
# Beyond which a rank is stuck.
PATIENCE = 60.0
CUDA_PATIENCE = 45.0
# What a rank that was stopped has, once it goes on, to end with an error.
RESUMED_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """In seconds: when a rank is warned about, the timeout of the group, and how long pauses are."""

    warned: float = 5.0
    timeout: float = 9.0
    stopped: float = 10.0
    cut: float = 3.0
    noticed: float = 1.0
    off: float = 1.0
    # Of a wait on a device, how long after the timeout it has ended.
    late: float = 3.0


@dataclass(kw_only=True)
class Outcome:
    """What came of a fault that struck ``at``, by rank."""

    at: float
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    output: str = ""
    # How long the slowest rank, other than the victim, took to end.
    ended: float = 0.0


def draw(kind: str, seed: int, times: Times, *, hosts: tuple[int, ...] = (1, 2), device: str = "cpu") -> Fault:
    chance, on_cuda = random.Random(f"{kind} {seed}"), device != "cpu"
    ranks = CUDA_RANKS if on_cuda else chance.choice([2, 3, 4])
    place = chance.choice(PLACES) if kind == "exception" else ""
    return Fault(
        kind="exception" if kind in RAISED else kind,
        ranks=ranks,
        hosts=2 if kind in LINKS else 1 if on_cuda else chance.choice(hosts),
        victim=chance.randrange(ranks),
        step=chance.randrange(5, 40) if on_cuda else chance.randrange(3, STEPS // 2),
        after=chance.uniform(0.0, 0.02),
        place=kind.removeprefix("raise in ") if kind in RAISED else place,
        timeout=times.timeout if kind in SILENCES else 60.0,
        warned=times.warned,
        device=device,
        waits=WAITS[seed % len(WAITS)] if on_cuda else "",
    )


def live_through(fault: Fault, folder: Path, times: Times) -> Outcome:
    """Run the training of ``fault``, and do what its ranks cannot do themselves."""
    lab = Lab(LabPlan(name=f"faults{os.getpid()}", hosts=2)) if fault.hosts == 2 else contextlib.nullcontext()
    with lab as hosts, _running(fault, folder, hosts, "train") as (ranks, outcome):
        outcome.at = _disturb(fault, folder, hosts, ranks, times) if fault.kind != "none" else 0.0
        deadline = time.monotonic() + (PATIENCE if fault.device == "cpu" else CUDA_PATIENCE)
        is_stopped = fault.kind == "SIGSTOP"
        _await([rank for number, rank in enumerate(ranks) if not is_stopped or number != fault.victim], deadline)
        outcome.ended = time.monotonic() - outcome.at
        if is_stopped and fault.device != "cpu":
            ranks[fault.victim].send_signal(signal.SIGCONT)
            _await([ranks[fault.victim]], time.monotonic() + RESUMED_SECONDS)
    return outcome


def survive(seeds: int, folder: Path, times: Times, *, device: str = "cuda") -> tuple[Fault, Outcome]:
    """All that a training survives, in ranks that live on."""
    fault = replace(draw("survived", 0, times, device="cuda"), timeout=60.0, device=device)
    with _running(fault, folder, None, "survive", seeds) as (ranks, outcome):
        _await(ranks, time.monotonic() + CUDA_PATIENCE + 2.0 * seeds * len(SURVIVED))
    return fault, outcome


@contextlib.contextmanager
def _running(
    fault: Fault, folder: Path, lab: Lab | None, function: str, *more: Any
) -> Iterator[tuple[list[Forked], Outcome]]:
    """The ranks, and what came of them, which is known when the context ends."""
    folder.mkdir()
    outcome = Outcome(at=0.0)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        ranks = list(_start(fault, folder, lab, log, function, *more))
        for rank in ranks:
            stack.callback(rank.kill_all)
        yield ranks, outcome
        outcome.output = os.pread(log.fileno(), 20_000, 0).decode(errors="replace")
        paths = {number: folder / f"rank-{number}" for number in range(fault.ranks)}
        outcome.ranks = {number: json.loads(path.read_text()) for number, path in paths.items() if path.exists()}


def _await(ranks: Iterable[Forked], deadline: float) -> None:
    for rank in ranks:
        with contextlib.suppress(Exception):
            rank.wait(max(0.1, deadline - time.monotonic()))


def _start(fault: Fault, folder: Path, lab: Lab | None, log: Any, function: str, *more: Any) -> Iterator[Forked]:
    hosts = [Host(addresses={})]
    meeting = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if lab is not None:
        addresses = {host.name: host.address for host in lab.hosts}
        hosts = [Host(namespace=host.namespace, name=host.name, addresses=addresses) for host in lab.hosts]
        meeting = {"MASTER_ADDR": lab.hosts[0].address, "GLOO_SOCKET_IFNAME": lab.hosts[0].interface}
    meeting |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(fault.ranks), "OMP_NUM_THREADS": "1"}
    for rank in range(fault.ranks):
        variables = {**os.environ, **meeting, "RANK": str(rank)}
        if fault.device != "cpu":
            variables |= {"LOCAL_RANK": "0", **SharedGpuPlan(ranks=fault.ranks).variables(rank)}
        host = hosts[rank * len(hosts) // fault.ranks]
        yield fork(f"tests.faulty:{function}", fault, folder, host, *more, output=log, variables=variables)


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
    report = f"{fault}: {json.dumps(outcome.ranks)}\n{outcome.output[-3000:]}"
    assert outcome.at, report
    if fault.kind in HARMLESS:
        assert {each.get("digest") for each in outcome.ranks.values()} == {expected}, report
        assert len(outcome.ranks) == fault.ranks, report
        return [0.0]
    seconds = []
    for rank in range(fault.ranks):
        if rank == fault.victim and fault.kind != "cut link":
            continue
        each = outcome.ranks.get(rank)
        assert each is not None, f"rank {rank} is stuck, or has ended without a word. {report}"
        # Of a backward that raised the others hear in the control flags, and their wire is whole. On a device they hear
        # of it a window later, when the rank may have ended.
        errors = ["PeerFailedError"] if fault.place == "backward" else ["CommunicatorLostError"]
        errors += ["CommunicatorLostError"] * (fault.device != "cpu")
        assert each.get("error") in errors, f"rank {rank}: {report}"
        lost = _lost(fault, rank)
        named = any(re.search(rf"\brank {other}\b", each["message"]) for other in lost)
        assert named, f"rank {rank} names none of {lost}: {report}"
        seconds.append(each["at"] - outcome.at)
    if fault.kind in ENDINGS:
        assert max(seconds) <= times.noticed, f"{seconds}: {report}"
        return seconds
    if fault.device == "cpu":
        assert all(abs(each - times.timeout) <= times.off for each in seconds), f"{seconds}: {report}"
    else:
        assert max(seconds) <= times.timeout + times.late, f"{seconds}: {report}"
        stopped = outcome.ranks.get(fault.victim, {})
        assert stopped.get("error"), f"the stopped rank has not ended with an error when it went on: {report}"
    warnings = [
        at - outcome.at
        for each in outcome.ranks.values()
        for at, line in each["warnings"]
        if "error only after" in line
    ]
    assert warnings, f"nobody was warned. {report}"
    assert abs(min(warnings) - times.warned) <= 2 * times.off, f"warned after {warnings} s: {report}"
    return seconds


def check_survived(fault: Fault, outcome: Outcome, times: Times) -> dict[str, list[float]]:
    """By case, the seconds after which others heard of it. AssertionError if something was not as it must be."""
    assert len(outcome.ranks) == fault.ranks, (
        f"{sorted(outcome.ranks)} have come to their end: {outcome.output[-3000:]}"
    )
    seconds: dict[str, list[float]] = {}
    for name in outcome.ranks[0]:
        case = name.rpartition(" ")[0]
        by_rank = {rank: report[name] for rank, report in outcome.ranks.items()}
        report = f"{name}: {json.dumps(by_rank)}"
        assert len({str(each["digests"]) for each in by_rank.values()}) == 1, f"replicas differ: {report}"
        victim, window, digests = (by_rank[0][key] for key in ("victim", "window", "digests"))
        dropped = case == "NaN, drop-rank"
        assert (digests[window] == digests[window - 1]) is not dropped, f"a step too many, or too few: {report}"
        assert digests[-1] != digests[-2], f"training does not go on: {report}"
        for rank, each in by_rank.items():
            said = [(text, at) for _, _, text, at in each["raised"] if f"rank {victim}" in text]
            if case in ("NaN, skip", "NaN, drop-rank"):
                # One line of warning, on rank 0.
                assert not each["raised"], report
                said = [(text, at) for at, text in each["warnings"] if f"rank {victim}" in text]
                if rank != 0:
                    continue
            elif rank == victim and "caught" in case:
                continue
            assert said, f"rank {rank} has not heard of it: {report}"
            seconds.setdefault(case, []).append(said[0][1] - each["at"])
    late = {case: each for case, each in seconds.items() if max(each) > times.noticed}
    assert not late, f"heard of it too late: {late}"
    return seconds


def _lost(fault: Fault, rank: int) -> list[int]:
    """Who may be named by ``rank``."""
    if fault.kind != "cut link":
        return [fault.victim]
    return [other for other in range(fault.ranks) if 2 * other // fault.ranks != 2 * rank // fault.ranks]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=3, help="with --device cuda: trials at once")
    parser.add_argument("--seconds", type=float, default=240.0, help="with --device cuda: no trial begins after these")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *RAISED, "survived"], help="by default all")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2] if os.geteuid() == 0 else [1], choices=[1, 2])
    return parser.parse_args()


def main() -> int:
    options, times, began = _options(), Times(), time.monotonic()
    on_cuda, known = options.device == "cuda", dict[tuple[int, int], str]()
    kinds = options.kinds or ([*CUDA_KINDS, "survived"] if on_cuda else list(KINDS))
    if not on_cuda:
        kinds = [kind for kind in kinds if kind not in LINKS or 2 in options.hosts]
    seeds = range(options.first, options.first + options.seeds)
    trials = [(kind, seed) for kind in kinds for seed in (seeds[:1] if kind == "survived" else seeds)]
    if on_cuda:
        # Those that take longest first.
        trials.sort(key=lambda trial: trial[0] not in ("SIGSTOP", "survived"))
    rows: dict[str, list[list[float] | str]] = {kind: [] for kind in kinds if kind != "survived"}

    def expected(fault: Fault) -> str:
        # Where the hosts are tells the order in which sums are made.
        place = fault.ranks, fault.hosts
        if fault.kind in HARMLESS and place not in known:
            known[place] = undisturbed(fault, Path(name) / f"undisturbed-{len(known)}", times)
        return known.get(place, "")

    def run(trial: tuple[str, int]) -> None:
        kind, seed = trial
        folder = Path(name) / f"{kind} {seed}".replace(" ", "-")
        if on_cuda and time.monotonic() - began > options.seconds:
            rows.setdefault(kind, []).append("not begun in time")
            return
        try:
            if kind == "survived":
                for case, seconds in check_survived(*survive(options.seeds, folder, times), times).items():
                    rows[case] = [[each] for each in seconds]
                return
            fault = draw(kind, seed, times, hosts=tuple(options.hosts), device=options.device)
            rows[kind].append(check(fault, live_through(fault, folder, times), times, expected(fault)))
        except Exception as error:
            rows.setdefault(kind, []).append(str(error))
            print(f"{kind}, seed {seed} FAILED after {time.monotonic() - began:.0f} s: {error}", flush=True)
        if not on_cuda and seed == seeds[-1]:
            print(_row(kind, rows[kind]), flush=True)

    with tempfile.TemporaryDirectory() as name:
        if on_cuda:
            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(run, trials))
        else:
            # Hosts are made in the first thread.
            for trial in trials:
                run(trial)
    print(f"\n{'':22s} as it must be   median s   most s     ({time.monotonic() - began:.0f} s)")
    print(*(_row(kind, came) for kind, came in rows.items()), sep="\n")
    return int(any(isinstance(trial, str) for came in rows.values() for trial in came))


def _row(kind: str, came: list[list[float] | str]) -> str:
    seconds = [each for trial in came if not isinstance(trial, str) for each in trial]
    good = sum(not isinstance(trial, str) for trial in came)
    median, most = (f"{f(seconds):.2f}" if seconds else "-" for f in (statistics.median, max))
    return f"{kind:22s} {good:4d} of {len(came):<4d} {median:>12s} {most:>8s}"


if __name__ == "__main__":
    sys.exit(main())
