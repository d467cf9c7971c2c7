"""The watch by itself: what is thought of ranks, who waits for whom, what is said, and what strangers cannot do."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gradsync.base.files import from_json, from_json_or
from gradsync.communicator import InProcessWorld
from gradsync.communicator.collective import Collective
from gradsync.communicator.rendezvous import Invitation, Rendezvous, enter, own_addresses
from gradsync.health.watch import dump
from gradsync.health.watch.agent import Agent, Plan
from gradsync.health.watch.detector import SLOW_SECONDS, Detector, ExitRecord, Suspect, at_odds, roots
from gradsync.health.watch.guards import GRACE_SECONDS, Guards
from gradsync.health.watch.messages import Member, exit_text, sort_key, suspect_text
from gradsync.health.watch.pace_meter import PaceMeter
from gradsync.health.watch.protocol import HUB, LARGEST, Frames, Line, ProtocolError, pack
from gradsync.health.watch.status import UNKNOWN, Position, RankStatus, Sampler, Wait
from gradsync.tools.cli.main import app
from tests.fuzz_sockets import Doors, Stranger
from tests.processes import eventually
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

MEMBERS = tuple(Member(rank=number, host="here", process=100 + number) for number in range(4))


def stands(
    started: int = 0, *, waits: int = 0, seconds: float = 0.0, what: str = "all_reduce", **more: Any
) -> RankStatus:
    """A rank that has started so many collectives on its only communicator, and waits in one of them, or in none."""
    awaited = (
        (Wait(communicator=0, place=waits, what=f"collective {waits} ({what})", seconds=seconds),) if waits else ()
    )
    given = {"windows": 7, "phase": "synchronizing", "progress": "", "seconds": 0.0, **more}
    return RankStatus(started=(started,), waits=awaited, **given)


# -- who waits for whom -----------------------------------------------------------------------------------------------


def test_who_has_started_less_is_waited_for() -> None:
    statuses = {0: stands(12, waits=12), 1: stands(11), 2: stands(14, waits=12)}
    assert {rank: sorted(waiters) for rank, waiters in roots(statuses).items()} == {1: [0, 2]}


def test_a_rank_that_is_held_up_itself_is_not_the_cause() -> None:
    statuses = {0: stands(12, waits=12), 1: stands(11, waits=11), 2: stands(10)}
    assert set(roots(statuses)) == {2}
    # Unless there is nobody else: then each is in something that others are not in.
    crossed = {
        0: RankStatus(windows=1, phase="idle", progress="", seconds=0, started=(5, 2), waits=(wait_on(0, 5),)),
        1: RankStatus(windows=1, phase="idle", progress="", seconds=0, started=(4, 3), waits=(wait_on(1, 3),)),
    }
    assert set(roots(crossed)) == {0, 1}


def wait_on(communicator: int, place: int) -> Wait:
    return Wait(communicator=communicator, place=place, what="collective 1 (broadcast)", seconds=9.0)


def test_nobody_is_blamed_while_all_are_in_the_same_collective() -> None:
    statuses = {rank: stands(12, waits=12, seconds=60.0) for rank in range(3)}
    assert roots(statuses) == at_odds(statuses) == {}


def test_other_collectives_in_the_same_place_are_seen() -> None:
    statuses = {0: stands(12, waits=12), 1: stands(12, waits=12), 2: stands(12, waits=12, what="broadcast")}
    assert {rank: other for rank, (other, _, _) in at_odds(statuses).items()} == {2: 0}


# -- what is thought of ranks -----------------------------------------------------------------------------------------


def judge_of(*statuses: RankStatus, now: float = 100.0) -> Detector:
    detector = Detector(0, range(1, len(statuses)), now)
    for rank, status in enumerate(statuses):
        detector.update(rank, status, now)
    return detector


def hear_all(detector: Detector, now: float, *statuses: RankStatus) -> None:
    for rank, status in enumerate(statuses):
        detector.update(rank, status, now)


def test_a_slow_rank_is_warned_about_ever_more_seldom_and_then_forgotten() -> None:
    detector = judge_of(stands(12), stands(11))
    told = []
    for second in range(100):
        now = 100.0 + second
        hear_all(detector, now, stands(12, waits=12, seconds=float(second)), stands(11))
        told += [(second, each.kind, each.member, each.waiters) for each in detector.due(now)]
    assert told == [(second, "behind", 1, (0,)) for second in (5, 10, 20, 40, 80)]
    hear_all(detector, 200.0, stands(12), stands(12))
    assert detector.due(200.0) == []
    hear_all(detector, 206.0, stands(13, waits=13, seconds=5.5), stands(12))
    assert [each.member for each in detector.due(206.0)] == [1]


def test_silence_is_noticed_when_somebody_waits() -> None:
    detector = judge_of(stands(12), stands(12), stands(12))
    detector.update(2, stands(12), 106.0)
    detector.update(0, stands(12), 106.0)
    assert detector.suspects(106.0) == [], "nobody waits, and a step may be long"
    detector.update(0, stands(13, waits=13, seconds=2.0), 106.0)
    (silent,) = detector.due(106.0)
    assert (silent.member, silent.kind, silent.waiters) == (1, "silent", (0,))
    assert silent.seconds == pytest.approx(6.0)


def test_who_was_stopped_itself_thinks_nothing_of_others() -> None:
    detector = judge_of(stands(12, waits=12, seconds=3.0), stands(12))
    detector.wake(200.0)
    detector.update(0, stands(12, waits=12, seconds=3.0), 200.0)
    assert detector.suspects(200.0) == []


def test_only_the_hub_says_who_is_behind() -> None:
    detector = Detector(1, [0], 0.0, sees_all=False)
    detector.update(0, stands(11), 10.0)
    detector.update(1, stands(12, waits=12, seconds=9.0), 10.0)
    assert detector.suspects(10.0) == []
    detector.update(1, stands(12, waits=12, seconds=15.0), 16.0)
    assert [each.kind for each in detector.suspects(16.0)] == ["silent"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.floats(0.0, 4.9)), max_size=60))
def test_ranks_that_speak_and_wait_little_are_never_suspected(steps: list[tuple[int, int, float]]) -> None:
    """However they wait for each other: no wait that is shorter than the limit, heard of in time, is worth a word."""
    now = 0.0
    detector = Detector(0, [1, 2], now)
    for rank, place, seconds in steps:
        now += 0.1
        hear_all(detector, now, *(stands(5) for _ in range(3)))
        detector.update(rank, stands(5, waits=place, seconds=seconds), now)
        assert [each for each in detector.suspects(now) if each.seconds >= SLOW_SECONDS] == []
        assert detector.due(now) == []


def test_a_rank_that_left_strands_only_those_it_did_not_serve() -> None:
    left = ExitRecord(member=1, left=True, words="has ended its script", at=0.0, status=stands(12))
    gone = ExitRecord(member=1, left=False, words="was killed", at=0.0, status=stands(12))
    served, unserved = (0, 12), (0, 13)
    assert [left.strands(*served), left.strands(*unserved)] == [False, True]
    assert gone.strands(*served)
    detector = judge_of(stands(), stands())
    assert detector.end(left, 0.0)
    assert not detector.end(gone, 0.0), "the connection of one that has left closes, too"
    assert detector.exits == {1: left}


# -- what is said -----------------------------------------------------------------------------------------------------


def test_causes_are_told_before_consequences() -> None:
    def exit_record(member: int, words: str, left: bool = True) -> ExitRecord:
        return ExitRecord(member=member, left=left, words=words, at=float(-member), status=stands())

    exits = [
        exit_record(0, "has ended its script"),
        exit_record(1, "raised CommunicatorLostError: rank 3 …"),
        exit_record(2, "raised ValueError: no luck"),
        exit_record(3, "was killed", left=False),
    ]
    assert [each.member for each in sorted(exits, key=sort_key)] == [3, 2, 1, 0]


def test_words_say_who_where_and_what_to_do() -> None:
    status = stands(12, waits=12, progress="2 of 5 buckets started")
    said = exit_text(MEMBERS, ExitRecord(member=1, left=False, words="is gone", at=0.0, status=status, age=0.4))
    assert said.startswith("rank 1 (process 101 on here) is gone at ")
    assert "0.4 s before it was in window 8, synchronizing (2 of 5 buckets started), waiting in collective 12" in said
    assert "Start all ranks again" in said
    suspect = Suspect(
        member=1, kind="behind", seconds=5.2, waiters=(0, 2, 3), what="collective 13 (all_reduce)", status=stands(12)
    )
    said = suspect_text(MEMBERS, suspect, is_here=False)
    assert "rank 1 (process 101 on here) keeps others waiting for 5 s: rank 0, rank 2 and rank 3 wait in" in said


def test_what_the_kernel_says_of_a_stopped_process_is_said() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        members = (MEMBERS[0], Member(rank=1, host="here", process=child))
        silent = Suspect(member=1, kind="silent", seconds=6.0, waiters=(0,), what="x", status=stands())
        said = suspect_text(members, silent, is_here=True)
        assert f"rank 1 (process {child} on here) has not been heard of for 6 s; rank 0 waits in x. " in said
        assert "Its process is stopped (SIGSTOP, or Ctrl-Z)" in said
        assert "It is stopped, its link is cut, or" in suspect_text(members, silent, is_here=False)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# -- standings --------------------------------------------------------------------------------------------------------


class Engine:
    """A model as the watch sees it."""

    def __init__(self, windows: int, busy: bool = False) -> None:
        self.windows, self.busy, self.fails = windows, busy, False
        self.pace = PaceMeter()

    def position(self) -> Position:
        if self.fails:
            raise IndexError("buckets are laid anew")
        return Position(windows=self.windows, phase="idle", progress="no backward runs", busy=self.busy)

    def describe(self) -> str:
        return f"window {self.windows}"


def test_a_sampler_sees_waits_and_how_long_nothing_has_changed() -> None:
    first, second = Engine(3), Engine(1, busy=True)
    communicator = InProcessWorld(1).communicator(0)
    guards = Guards(communicator)
    for _ in range(2):
        guards.add(communicator, str, lambda number, message: None)
    assert guards.states == [communicator.state]
    sampler = Sampler(lambda: guards.states)
    sampler.add(first)
    sampler.add(second)
    assert sampler.sample(10.0).windows == 1, "the one that is at work"
    second.busy = False
    assert sampler.sample(20.0).windows == 3
    communicator.all_reduce(torch.ones(1)).wait()
    assert sampler.sample(30.0).started == (1,)
    assert sampler.sample(34.0).seconds == pytest.approx(4.0)
    collective = Collective(communicator, "all_reduce", "sum", 3, torch.float32)
    collective.place = 2
    communicator.state.waits[collective] = 35.0
    (wait,) = sampler.sample(37.5).waits
    assert (wait.communicator, wait.place, wait.seconds) == (0, 2, 2.5)
    assert "all_reduce sum of 3" in wait.what
    first.fails = second.fails = True
    assert sampler.sample(40.0).phase == "idle", "whatever cannot be seen now is looked at again later"
    del first, second
    assert sampler.models == []


data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
waits = st.builds(
    Wait, communicator=st.integers(-9, 9), place=st.integers(-9, 99), what=st.text(), seconds=st.floats(0, 99)
)
statuses = st.builds(
    RankStatus,
    windows=st.integers(-9, 99),
    phase=st.text(max_size=9),
    progress=st.text(max_size=9),
    seconds=st.floats(-9, 99),
    started=st.lists(st.integers(-9, 99), max_size=4).map(tuple),
    waits=st.lists(waits, max_size=4).map(tuple),
)


@given(data | statuses.map(dataclasses.asdict))
def test_whatever_is_read_as_a_standing_does_no_harm(told: Any) -> None:
    status = from_json_or(RankStatus, told, UNKNOWN)
    assert from_json(RankStatus, json.loads(json.dumps(dataclasses.asdict(status)))) == status
    detector = judge_of(stands(12, waits=12, seconds=9.0), status)
    for each in detector.suspects(110.0):
        suspect_text(MEMBERS, each, is_here=False)


def hear(told: list[Any]) -> tuple[list[Any], dict[int, Any]]:
    heard: Future[None] = Future()

    def hear_all(now: float) -> None:
        try:
            for each in told:
                for name in ("beat", "suspects", "ended", "error", "given_up"):
                    hub.agent._take(HUB, {"beat": {}, name: each} if name == "suspects" else {name: each}, now)
            heard.set_result(None)
        except BaseException as error:
            heard.set_exception(error)

    with Hub() as hub:
        # On the watch's own thread, which sends at the same time.
        hub.agent._request(hear_all)
        heard.result(30.0)
        return hub.agent._reported, hub.agent._detector.exits


@settings(max_examples=10, deadline=None)
@given(st.lists(data, max_size=20))
def test_whatever_is_told_of_ranks_does_no_harm(told: list[Any]) -> None:
    stood = dataclasses.asdict(stands(12))
    nobody = {"member": 7, "left": True, "words": "left", "at": 0.0, "status": stood}
    suspect = {"member": 1, "kind": "behind", "seconds": 9.0, "waiters": [9], "what": "", "status": stood}
    assert pool_of(1).run(hear, [*told, nobody, [suspect]]) == [([], {})]


# -- frames and doors -------------------------------------------------------------------------------------------------


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text()), max_size=5), st.randoms(use_true_random=False))
def test_frames_come_out_whole_however_they_are_cut(messages: list[dict[str, Any]], chance: random.Random) -> None:
    stream = b"".join(pack(message) for message in messages)
    frames, heard = Frames(), []
    while stream:
        size = chance.randint(1, len(stream))
        heard += frames.feed(stream[:size])
        stream = stream[size:]
    assert heard == messages


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_bytes_of_any_kind_are_frames_or_refused(pieces: list[bytes]) -> None:
    frames = Frames()
    try:
        for piece in pieces:
            assert all(isinstance(message, dict) for message in frames.feed(piece))
            assert len(frames._held) <= LARGEST + 4
    except ProtocolError:
        pass


def test_a_frame_is_refused_before_it_has_come() -> None:
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        Frames().feed(struct.pack(">I", 2**32 - 1))
    with pytest.raises(ProtocolError, match="at most"):
        pack({"long": "x" * (LARGEST + 1)})


class Hub:
    """A real hub with real sockets, in a rank of its own world, and what is told to those it waits for.

    Over a group of its own: what it loses is lost, and the rank's own group is for the tests that follow.
    """

    def __init__(self, size: int = 2, timeout: float = 60.0) -> None:
        self.group: Any = dist.new_group([dist.get_rank()])
        rendezvous = Rendezvous(set(range(1, size)))
        self.lines = {rank: come(rendezvous.invitation, rank) for rank in range(1, size)}
        plan = Plan(members=MEMBERS[:size], me=0, here=(True,) * size, timeout=timeout)
        self.agent = Agent(plan, self.group, {number: Line(each) for number, each in rendezvous.take().items()})
        self.agent.start()

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.leave("has ended its test")
        dist.destroy_process_group(self.group)


def come(invitation: Invitation, rank: int, *, is_here: bool = True) -> Line:
    return Line(enter(invitation, rank, "rank 0", is_here=is_here))


def attack(seed: int, count: int) -> list[str]:
    """Strangers of every kind, and then the rank that is missing, while some of them still stand there."""
    with contextlib.closing(Doors()) as doors:
        stranger = Stranger(seed, doors.addresses(), doors.replayed())
        stranger.attack(count)
        assert stranger.sent > count // 2
        return doors.wrong()


def test_strangers_neither_join_nor_keep_a_rank_out() -> None:
    assert pool_of(1).run(attack, random.randrange(1 << 32), 1000) == [[]]


def test_a_rank_comes_by_an_address_and_nobody_does_when_all_are_in() -> None:
    with contextlib.closing(Rendezvous({1}, others_elsewhere=True)) as rendezvous:
        addresses = rendezvous.invitation.addresses
        assert addresses
        assert all(address != "0.0.0.0" for address, _ in addresses)
        come(rendezvous.invitation, 1, is_here=False).close()
        (connection,) = rendezvous.take().values()
        connection.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(addresses[0], 1.0)


def test_addresses_are_those_of_the_chosen_interface_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,no_such_thing")
    assert own_addresses() == [(socket.AF_INET, "127.0.0.1")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_thing")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_addresses()
    told = [(2, ("127.0.1.1", 0)), (2, ("10.1.2.3", 0)), (10, ("fe80::1%2", 0, 0, 2)), (2, ("10.1.2.3", 0))]
    answers = [(family, 1, 6, "", address) for family, address in told]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    assert own_addresses() == [(2, "10.1.2.3")], "the loopback is for hosts by name only"


def lines_that_end() -> dict[str, Any]:
    """One rank says goodbye, one is cut off by a line that breaks, one is gone: who hears what."""
    with Hub(4) as hub:
        lines = hub.lines
        lines[1].send({"exit": "has ended its script", "status": dataclasses.asdict(stands(12))})
        lines[1].close()
        lines[2].connection.sendall(b"\xff" * 100)
        lines[3].close()
        exits = hub.agent._detector.exits
        assert eventually(lambda: {1, 3} <= set(exits) and 2 not in hub.agent._lines)
        told = hub.agent.failure_message("The communicator failed")
        return {"endings": {rank: each.left for rank, each in exits.items()}, "told": told}


def test_a_goodbye_a_broken_line_and_an_end_are_told_apart() -> None:
    (outcome,) = pool_of(1).run(lines_that_end)
    assert outcome["endings"] == {1: True, 3: False}
    assert outcome["told"].startswith("rank 3 (process 103 on here) has ended without a word")
    assert outcome["told"].endswith("The communicator failed")


def watch_that_fails() -> tuple[list[dict[str, Any]], str]:
    """Its thread dies of something unforeseen."""
    with Hub() as hub:
        line = hub.lines[1]

        def fail(now: float) -> RankStatus:
            raise ZeroDivisionError("unforeseen")

        hub.agent.sampler.sample = fail  # type: ignore[method-assign]
        assert eventually(lambda: not hub.agent._thread.is_alive())
        line.connection.settimeout(5.0)
        messages = []
        while not line.end:
            messages += line.receive()
        return [message for message in messages if "beat" not in message], line.end


def test_a_watch_that_fails_is_no_sign_of_a_lost_rank() -> None:
    ((messages, end),) = pool_of(1).run(watch_that_fails)
    assert messages == [{"off": True}]
    assert end == "closed"


def lose_what_waits() -> tuple[str, str, str]:
    """Of two communicators the one on which somebody waits for a rank that has gone, and not the other."""
    with Hub() as hub:
        line = hub.lines[1]
        busy, idle = (InProcessWorld(2).communicator(0) for _ in range(2))
        engine = Engine(3)
        for communicator in (busy, idle):
            hub.agent.guard(communicator)
        hub.agent.sampler.add(engine)
        said: list[str] = []

        def wait() -> None:
            try:
                busy.all_reduce(torch.ones(3)).wait()
            except Exception as error:
                said.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        assert eventually(lambda: bool(busy.state.waits))
        line.close()
        thread.join(20)
        time.sleep(2 * GRACE_SECONDS)
        return said[0], str(busy.failure), str(idle.failure)


def test_only_who_waits_for_a_lost_rank_loses_its_communicator() -> None:
    ((said, failure, other),) = pool_of(1).run(lose_what_waits)
    assert said == failure
    assert said.startswith("rank 1 (process 101 on here) has ended without a word")
    assert "rank 0 waited for it in window 4, in collective 1 (all_reduce sum of 3" in said
    assert other == "None"


# -- dumps ------------------------------------------------------------------------------------------------------------


def write(folder: Path, rank: int, status: RankStatus, **more: Any) -> None:
    group = {"ranks": [0, 1, 2], "status": dataclasses.asdict(status), "known": "", "others": {}}
    content = {"format": dump.FORMAT, "rank": rank, "host": "here", "process": 100 + rank, "groups": [group], **more}
    times = {"time": "2026-01-01T12:00:00+0000", "models": [], "stacks": {"MainThread 1": ["train.py:3 load"]}}
    (folder / f"rank-{rank}.json").write_text(json.dumps(times | content))


@pytest.fixture
def cli() -> Any:
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["explain", *map(str, arguments)])


def test_explain_says_who_waits_for_whom(tmp_path: Path, cli: Any) -> None:
    write(tmp_path, 0, stands(12, waits=12, seconds=8.0))
    write(tmp_path, 1, stands(11))
    write(tmp_path, 2, stands(12, waits=12, seconds=7.0))
    said = cli(tmp_path).output
    assert "rank 0 and rank 2 wait for rank 1 in collective 12 (all_reduce). rank 1 is at train.py:3 load." in said
    assert "rank 0 (process 100 on here) at 12:00:00: in window 8, synchronizing, waiting in collective 12" in said


def test_explain_says_who_wrote_nothing_and_who_is_elsewhere(tmp_path: Path, cli: Any) -> None:
    write(tmp_path, 0, stands(12, waits=12, seconds=8.0))
    write(tmp_path, 1, stands(12, waits=12, seconds=8.0, what="broadcast"))
    said = cli(tmp_path).output
    assert "rank 2 wrote nothing" in said
    assert "rank 1 is in collective 12 (broadcast), where rank 0 is in collective 12 (all_reduce)." in said
    write(tmp_path, 1, stands(12))
    write(tmp_path, 2, stands(12))
    write(tmp_path, 0, stands(12))
    assert "Nobody waits for anybody." in cli(tmp_path).output


def test_explain_leaves_out_what_is_of_another_request(tmp_path: Path, cli: Any) -> None:
    write(tmp_path, 0, stands(12, waits=12, seconds=8.0))
    write(tmp_path, 1, stands(12))
    write(tmp_path, 2, stands(12), time="2026-01-01T11:00:00+0000")
    said = cli(tmp_path).output
    assert "rank 2 (process 102 on here) wrote before, at 11:00:00, and not with the others." in said
    assert "rank 2 wrote nothing" in said
    assert "rank 0 may wait for what wrote nothing." in said


def test_explain_without_a_watch_says_where_each_rank_is(tmp_path: Path, cli: Any) -> None:
    write(tmp_path, 0, stands(), groups=[])
    said = cli(tmp_path).output
    assert "rank 0 (process 100 on here): at train.py:3 load" in said
    assert "No watch was set up" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "\0", '{"format": 1, "stacks": []}'])
def test_explain_refuses_what_no_rank_wrote(tmp_path: Path, cli: Any, text: str) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    answer = cli(tmp_path)
    assert answer.exit_code != 0
    assert "rank-0.json is not what a rank writes" in str(answer.exception)


def test_explain_of_nothing_says_how_to_get_something(tmp_path: Path, cli: Any) -> None:
    assert "GRADSYNC_DUMP=" in str(cli(tmp_path).exception)
    assert "is no folder" in str(cli(tmp_path / "none").exception)


def test_a_line_whose_way_is_broken_is_not_closed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        line = Line(ours)
        line._record_end(OSError(110, "Connection timed out"))
        assert line.end == "broken"
        line.close()
