"""Strangers at every socket that gradsync listens on: ``python -m tests.fuzz_sockets --messages 10000``.

Ranks listen while they meet, and only then (``communicator/rendezvous.py``): the watch's hub on a Unix socket and,
where there are several hosts, at addresses; every rank of a host on a Unix socket, for memory to share. Here one is
held open while two ranks train, and a third process, which knows where it is and nothing else, sends what it likes:
random bytes, answers that are cut off, proofs that are wrong or of another connection, frames, JSON of all shapes, a
byte now and then, nothing at all; as this user or, run by root, as another one. In the end the rank that is missing
comes, and is let in. Nobody else was, nothing has crashed, and the training never stood still for long.
"""

import argparse
import contextlib
import importlib
import json
import os
import pickle
import random
import socket
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.communicator.rendezvous import ANSWER, Rendezvous, code, enter
from gradsync.health.watch.protocol import pack
from tests.ranks import RankPool

__all__ = ["Seen", "attack_a_training"]

Address = tuple[int, Any]
# Of those who stand there and say little, so many at a time.
STANDING = 150
NOBODY = 65534


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of one rank: steps, the longest of them without an attack and under it, and what went wrong."""

    steps: int
    calm: float
    attacked: float
    wrong: tuple[str, ...]


# -- the stranger -----------------------------------------------------------------------------------------------------


class Stranger:
    """Sends one thing after the other to one address after the other."""

    def __init__(self, seed: int, addresses: list[Address], replayed: bytes) -> None:
        self._chance = random.Random(seed)
        self._addresses, self._replayed = addresses, replayed
        self._standing: list[socket.socket] = []
        self.sent = self.refused = 0

    def attack(self, messages: int) -> None:
        for number in range(messages):
            self._attack_once(number)
        for connection in self._standing:
            connection.close()

    def _attack_once(self, number: int) -> None:
        chance = self._chance
        connection = self._connect(*self._addresses[number % len(self._addresses)])
        if connection is None:
            self.refused += 1
            return
        with contextlib.suppress(OSError):
            for piece in self._says():
                connection.sendall(piece)
        self.sent += 1
        if chance.random() < 0.3:
            self._standing.append(connection)
            self._drip()
        else:
            if chance.random() < 0.2:
                # What is closed so is reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

    def _connect(self, family: int, address: Any) -> socket.socket | None:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(1.0)
        is_other = os.getuid() == 0 and self._chance.random() < 0.3
        if is_other:
            os.seteuid(NOBODY)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            return None
        finally:
            if is_other:
                os.seteuid(0)
        return connection

    def _drip(self) -> None:
        """A byte from one of those who stand there; the first of too many leaves."""
        with contextlib.suppress(OSError):
            self._chance.choice(self._standing).sendall(b"\0")
        if len(self._standing) > STANDING:
            self._standing.pop(0).close()

    def _says(self) -> list[bytes]:
        chance = self._chance
        claim = ANSWER.pack(chance.choice([1, 0, 7, -1, 2**62]), chance.randbytes(16), chance.randbytes(32))
        deep = b"[" * chance.randint(1, 400)
        return chance.choice(
            [
                [],
                [chance.randbytes(chance.randint(1, 3000))],
                [struct.pack(">I", chance.randint(0, 2**32 - 1))],
                [struct.pack(">I", 2**32 - 1) + chance.randbytes(64)],
                [claim],
                [claim[: chance.randint(1, ANSWER.size)], chance.randbytes(chance.randint(1, 60))],
                [self._replayed],
                [self._replayed[:-1]],
                [struct.pack(">I", len(deep)) + deep],
                [
                    pack({"beat": {"windows": "x"}}),
                    pack({"exit": "x"}),
                    pack({"ended": {"member": 0}}),
                    pack({"off": 1}),
                ],
            ]
        )


# -- the ranks --------------------------------------------------------------------------------------------------------


class Doors:
    """Rank 0's open sockets, with rank 1 still to come."""

    def __init__(self) -> None:
        self._rendezvous = Rendezvous({1}, others_elsewhere=True)
        self._invitation = self._rendezvous.invitation

    def addresses(self) -> list[Address]:
        return [way for is_here in (True, False) for way in self._invitation.ways(is_here=is_here)]

    def replayed(self) -> bytes:
        """What a rank would have said on another connection."""
        return ANSWER.pack(1, bytes(16), code(self._invitation.secret, bytes(16), 1))

    def wrong(self) -> list[str]:
        """What unauthenticated peers have achieved; then the missing rank comes."""
        found = [] if self._rendezvous.missing == {1} else ["somebody has joined"]
        with enter(self._invitation, 1, "rank 0", is_here=True):
            if set(joined := self._rendezvous.take()) != {1}:
                found.append("the missing rank was not let in")
            for connection in joined.values():
                connection.close()
        return found

    def close(self) -> None:
        self._rendezvous.close()


def _train(group: Any, folder: Path, doors_of_0: Doors | None) -> tuple[int, float, float]:
    """Steps until the attack is over, and the longest before it began and under it."""
    model = gradsync.DistributedDataParallel(nn.Linear(256, 256), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    longest, steps, last = {False: 0.0, True: 0.0}, 0, time.monotonic()
    while True:
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 50 and doors_of_0 is not None:
            told = [doors_of_0.addresses(), doors_of_0.replayed()]
            (folder / "told.part").write_bytes(pickle.dumps(told))
            (folder / "told.part").rename(folder / "told")
        over = torch.tensor([(folder / "over").exists()])
        dist.broadcast(over, 0, group=group)
        now = time.monotonic()
        if steps > 5:
            longest[steps > 50] = max(longest[steps > 50], now - last)
        last = now
        if over.item():
            return steps, longest[False], longest[True]


def rank_under_attack(messages: int, seed: int, folder: Path) -> Seen | tuple[int, int]:
    """Ranks 0 and 1 train; rank 2 is the stranger, which says how much was sent, and refused by the kernel."""
    group = dist.new_group([0, 1])
    try:
        if dist.get_rank() == 2:
            while not (folder / "told").exists():
                time.sleep(0.01)
            addresses, replayed = pickle.loads((folder / "told").read_bytes())
            stranger = Stranger(seed, addresses, replayed)
            stranger.attack(messages)
            return stranger.sent, stranger.refused
        opened = Doors() if dist.get_rank() == 0 else None
        steps, calm, attacked = _train(group, folder, opened)
        wrong = opened.wrong() if opened is not None else []
        if opened is not None:
            opened.close()
        return Seen(steps=steps, calm=calm, attacked=attacked, wrong=tuple(wrong))
    finally:
        if dist.get_rank() == 2:
            (folder / "over").touch()
        dist.barrier()


def attack_a_training(pool: RankPool, messages: int, seed: int, folder: Path) -> dict[str, Any]:
    """What both ranks have seen, in short."""
    first, second, (sent, refused) = pool.run(rank_under_attack, messages, seed, folder, timeout=580.0)
    assert isinstance(first, Seen)
    assert isinstance(second, Seen)
    return {
        "sent": sent,
        "not connected": refused,
        "wrong": [*first.wrong, *second.wrong],
        "steps": first.steps,
        "longest step without": round(max(first.calm, second.calm), 3),
        "longest step under attack": round(max(first.attacked, second.attacked), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pool = RankPool(3)
    try:
        with tempfile.TemporaryDirectory() as name:
            found = attack_a_training(pool, options.messages, options.seed, Path(name))
    finally:
        pool.close()
    print(json.dumps(found, indent=2))
    return 1 if found["wrong"] or found["longest step under attack"] > 1.0 else 0


if __name__ == "__main__":
    # Under its own name, by which ranks know what they are to run.
    sys.exit(importlib.import_module("tests.fuzz_sockets").main())
