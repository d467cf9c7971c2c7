"""Hosts on one machine: network namespaces whose links have a given rate.

::

    with Lab(LabPlan(name="bench", hosts=2, rate=Rate.parse("400mbit"))) as lab:
        code = lab.run(["python", "train.py"], ranks_per_host=1)

      host0                                           host1
      eth0 10.x.y.1 ═══ rate ═══ [ bridge ] ═══ rate ═══ eth0 10.x.y.2

Everything lives in namespaces of its own, the bridge too: the machine's own network is never touched. Each link is
shaped at both ends, so that both directions have the full rate, as on a switch. Delay and loss: ``far_link``.
"""

import faulthandler
import os
import re
import signal
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.tools.lab import far_link, system
from gradsync.tools.lab.host import (
    INTERFACE,
    Counters,
    Host,
    places_here,
    places_on,
    read_counters,
    run_at,
    run_program,
)
from gradsync.tools.lab.system import LabError, LabOwner, LabRecord, check_fit, inside, ip, lab_names, switch_name, tc
from gradsync.tools.launch import RankPlace, signals_raise

__all__ = ["Lab", "LabPlan", "LinkState", "Rate", "fork_ranks", "take_down"]

PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# "Mb/s" and "mbps" mean bits to some and bytes to others, so neither is taken.
BITS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", re.IGNORECASE)
BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)B/s")
SLOWEST, FASTEST = 8_000, 10**12
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,39}")
MOST_HOSTS = 200
SUBNETS = 256
LONGEST_DELAY = 10.0
# For which forked ranks write their stacks, to the descriptor of their errors.
TELLING, STDERR = signal.SIGUSR1, 2


@dataclass(frozen=True, kw_only=True, order=True)
class Rate:
    """A rate in bits a second, in powers of ten as on every network card."""

    bits_per_second: int

    def __post_init__(self) -> None:
        if not SLOWEST <= self.bits_per_second <= FASTEST:
            raise ConfigurationError(
                f"a link's rate must lie between 8kbit and 1000gbit, got {self.bits_per_second} bits a second"
            )

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """Read a rate: bits as in ``400mbit``, ``2.5gbit``, ``10Gbit/s``; bytes as in ``50MB/s``."""
        for pattern, bits in ((BITS, 1), (BYTES, 8)):
            match = pattern.fullmatch(text.strip())
            if match is not None:
                number, prefix = match.groups()
                return cls(bits_per_second=round(float(number) * bits * PREFIXES[prefix.lower()]))
        raise ConfigurationError(
            f"a link's rate is written like 800kbit, 400mbit, 2.5gbit or 50MB/s, got {text!r}. A b alone is refused: "
            "it means bits to some and bytes to others"
        )

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    def __str__(self) -> str:
        """The rate as :meth:`parse` and ``tc`` read it: ``2.5gbit``."""
        for prefix in ("t", "g", "m", "k"):
            if self.bits_per_second >= PREFIXES[prefix] and prefix != "t":
                number = f"{self.bits_per_second / PREFIXES[prefix]:.6f}".rstrip("0").rstrip(".")
                return f"{number}{prefix}bit"
        return f"{self.bits_per_second}bit"


@dataclass(frozen=True, kw_only=True)
class LabPlan:
    """What a lab is made from. Without a rate its links are as fast as the machine.

    A packet takes ``delay`` seconds from one host to another, and is lost with the probability ``loss``.
    """

    name: str = "default"
    hosts: int = 2
    rate: Rate | None = None
    delay: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigurationError(f"a lab's name is made of up to 40 letters, digits, - and _, got {self.name!r}")
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise ConfigurationError(f"a lab has 1 to {MOST_HOSTS} hosts, got {self.hosts}")
        if not 0.0 <= self.delay <= LONGEST_DELAY:
            raise ConfigurationError(f"packets take 0 to {LONGEST_DELAY:.0f} seconds to another host, got {self.delay}")
        if not 0.0 <= self.loss < 1.0:
            raise ConfigurationError(f"the probability that a packet is lost lies between 0 and 1, got {self.loss}")


@dataclass(frozen=True, kw_only=True)
class LinkState:
    """The link of a host, as it is now."""

    up: bool
    rate: Rate | None


class Lab:
    """A lab that lives as long as its context, or (:meth:`up`, :meth:`find`) until :meth:`down`."""

    def __init__(self, plan: LabPlan) -> None:
        self.plan = plan
        self._hosts: tuple[Host, ...] = ()
        self._stack = ExitStack()

    def __enter__(self) -> "Lab":
        with ExitStack() as stack:
            stack.enter_context(signals_raise())
            owner = LabOwner.current()
            self._make(owner)
            stack.callback(self._remove_own, owner)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        self._hosts = ()

    @classmethod
    def up(cls, plan: LabPlan) -> "Lab":
        """Create a lab that outlives this process."""
        lab = cls(plan)
        lab._make(None)
        return lab

    @classmethod
    def find(cls, name: str) -> "Lab":
        """The lab of that name, no matter who created it."""
        check_fit()
        record = LabRecord.of(LabPlan(name=name).name)
        if record is None:
            left = " only in parts: gradsync lab down removes them" if name in lab_names() else ""
            raise LabError(f"the lab {name} is not up{left or '. Make it with: gradsync lab up'}")
        ports = [link["ifname"] for link in _switch_links(name) if link["ifname"] != system.BRIDGE]
        lab = cls(LabPlan(name=name, hosts=len(ports), delay=record.delay, loss=record.loss))
        lab._hosts = _hosts_of(lab.plan, record)
        lab.plan = replace(lab.plan, rate=lab.links()[0].rate)
        return lab

    @property
    def hosts(self) -> tuple[Host, ...]:
        if not self._hosts:
            raise MisuseError(f"the lab {self.plan.name} is not up: use it in a with statement, or Lab.up(plan)")
        return self._hosts

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> int:
        """Run ``command`` once per rank, with torchrun's environment, and return its exit code.

        It is 0, or that of the rank that failed first; the others are then ended. 128 + n stands for signal n, as in a
        shell. Rank 0's output passes through, that of another rank is shown if it fails.
        """
        return run_program(places_on(self.hosts, ranks_per_host), command, env=env or {}, timeout=timeout)

    def set_rate(self, rate: Rate | None, *, host: int | None = None) -> None:
        """Set or remove the rate of all links, or of one host's. They stay up, and queued packets stay queued."""
        hosts = self.hosts if host is None else (self.hosts[host],)
        names = {each.namespace: [each.interface] for each in hosts}
        names[switch_name(self.plan.name)] = [each.name for each in hosts]
        for namespace, interfaces in names.items():
            if rate is not None:
                queue = f"tbf rate {rate.bits_per_second}bit burst 256kb latency 100ms"
                tc.lines(namespace, (f"qdisc replace dev {name} root {queue}" for name in interfaces))
            elif shaped := [name for name in interfaces if name in _rates(namespace)]:
                tc.lines(namespace, (f"qdisc delete dev {name} root" for name in shaped))
        if host is None:
            self.plan = replace(self.plan, rate=rate)

    def cut(self, host: int) -> None:
        """Take the link of a host down, as if its cable were pulled out of the switch."""
        self._set_link(host, "down")

    def heal(self, host: int) -> None:
        """Bring the link of a host up again."""
        self._set_link(host, "up")

    def counters(self) -> dict[int, Counters]:
        """What each host has sent and received, by its index."""
        return {host.index: inside(host.namespace, lambda: read_counters(INTERFACE)) for host in self.hosts}

    def links(self) -> dict[int, LinkState]:
        """The links as the system has them, by the host's index."""
        name = self.plan.name
        flags = {link["ifname"]: link["flags"] for link in _switch_links(name)}
        rates = _rates(switch_name(name))
        return {host.index: LinkState(up="UP" in flags[host.name], rate=rates.get(host.name)) for host in self.hosts}

    def processes(self) -> dict[int, list[int]]:
        """The numbers of the processes on each host, by its index."""
        return {host.index: system.processes(host.namespace) for host in self.hosts}

    def down(self) -> None:
        """Remove the lab, and end what runs in it."""
        take_down(self.plan.name)
        self._hosts = ()

    def _make(self, owner: LabOwner | None) -> None:
        check_fit()
        name = self.plan.name
        with system.alone():
            record = LabRecord.of(name)
            if record is not None and record.in_use:
                holder = "" if record.owner is None else f" and belongs to process {record.owner.pid}, which runs"
                raise LabError(
                    f"the lab {name} is already up{holder}. Use it, give another --name, or remove it with: gradsync "
                    f"lab down --name {name}"
                )
            system.remove(name)
            record = LabRecord(owner=owner, subnet=_free_subnet(name), delay=self.plan.delay, loss=self.plan.loss)
            self._hosts = _hosts_of(self.plan, record)
            try:
                _connect(self.plan, record, self._hosts)
                if self.plan.rate is not None:
                    self.set_rate(self.plan.rate)
            except BaseException:
                self._hosts = ()
                system.remove(name)
                raise

    def _remove_own(self, owner: LabOwner) -> None:
        if os.getpid() != owner.pid:
            return  # in a process that was forked inside the context
        with system.alone():
            record = LabRecord.of(self.plan.name)
            if record is None or record.owner == owner:
                system.remove(self.plan.name)

    def _set_link(self, index: int, state: str) -> None:
        hosts = self.hosts
        if not 0 <= index < len(hosts):
            raise ConfigurationError(f"the lab {self.plan.name} has hosts 0 to {len(hosts) - 1}, got {index}")
        ip("link", "set", "dev", hosts[index].name, state, namespace=switch_name(self.plan.name))


def take_down(name: str) -> bool:
    """Remove a lab and all that is left of it; returns whether there was anything."""
    check_fit()
    LabPlan(name=name)
    with system.alone():
        there = name in lab_names()
        system.remove(name)
    return there


def fork_ranks(
    lab: Lab | None,
    function: Callable[[], object],
    *,
    ranks_per_host: int = 1,
    ranks: int | None = None,
    timeout: float = 600.0,
) -> None:
    """Call ``function()`` in one forked process per rank, on the hosts of ``lab`` or, without one, on this machine.

    Forked, so that no rank has to import torch. A rank has torchrun's environment and one thread for torch. It must
    create its process group itself; this process must have none, and must not have used a GPU, because neither survives
    a fork.

    ``ranks`` is the number of ranks on this machine, which talk over loopback. If a rank raises, its traceback goes to
    stderr, the others are ended, and a :class:`LabError` names it. Ranks that are not done in time write their stacks
    there before they are ended. Ranks die with this process, even if it is killed.
    """
    if lab is None:
        places = places_here(ranks_per_host if ranks is None else ranks)
    elif ranks is not None:
        raise ConfigurationError("ranks= is for this machine; on the hosts of a lab say ranks_per_host=")
    else:
        places = places_on(lab.hosts, ranks_per_host)

    def work(place: RankPlace) -> None:
        faulthandler.register(TELLING, file=STDERR)
        torch.set_num_threads(1)  # the threads of the parent's pool were not forked; to wait for them would be forever
        function()

    failure = run_at(places, work, timeout, telling=TELLING)
    if failure is not None:
        raise LabError(f"{failure}. Its traceback is above, and the other ranks were ended")


def _connect(plan: LabPlan, record: LabRecord, hosts: Sequence[Host]) -> None:
    """Make the namespaces, the bridge and the links."""
    switch = switch_name(plan.name)
    ip("netns", "add", switch)
    # Without IPv6 and multicast the counters hold what the ranks send, and nearly nothing else.
    bridge = f"link add name {system.BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
    alias = f"link set dev {system.BRIDGE} alias '{record.alias}'"
    ip.lines(switch, [bridge, alias, f"link set dev {system.BRIDGE} addrgenmode none up"])
    is_far = plan.delay > 0 or plan.loss > 0
    taps = []
    for host in hosts:
        ip("netns", "add", host.namespace)
        if is_far:
            tap, port = partial(far_link.open_tap, host.interface), partial(far_link.open_tap, host.name)
            taps.append((inside(host.namespace, tap), inside(switch, port)))
        cable = f"link add name {host.interface} type veth peer name {host.name} netns {switch}"
        ip.lines(
            host.namespace,
            [
                "link set dev lo up",
                *([] if is_far else [cable]),
                f"link set dev {host.interface} addrgenmode none up",
                f"address add {host.address}/24 dev {host.interface}",
            ],
        )
    if is_far:
        far_link.start(switch, plan.delay, plan.loss, taps)
    ip.lines(switch, (f"link set dev {host.name} addrgenmode none master {system.BRIDGE} up" for host in hosts))


def _hosts_of(plan: LabPlan, record: LabRecord) -> tuple[Host, ...]:
    return tuple(
        Host(
            index=index,
            name=f"host{index}",
            namespace=system.host_name(plan.name, index),
            address=f"{record.subnet}.{index + 1}",
        )
        for index in range(plan.hosts)
    )


def _free_subnet(name: str) -> str:
    """Labs do not see each other; addresses of their own keep their logs apart."""
    taken = {record.subnet for lab in lab_names() if (record := LabRecord.of(lab)) is not None}
    first = zlib.crc32(name.encode()) % SUBNETS
    for number in range(SUBNETS):
        subnet = f"10.213.{(first + number) % SUBNETS}"
        if subnet not in taken:
            return subnet
    raise LabError(f"{SUBNETS} labs are up, which is the most. Remove one with: gradsync lab down")


def _switch_links(lab: str) -> list[dict[str, Any]]:
    return [link for link in ip.json("link", "show", namespace=switch_name(lab)) if link["ifname"] != "lo"]


def _rates(namespace: str) -> dict[str, Rate]:
    """The rates of the shaped interfaces in a namespace."""
    return {
        queue["dev"]: Rate(bits_per_second=queue["options"]["rate"] * 8)
        for queue in tc.json("qdisc", "show", namespace=namespace)
        if queue["kind"] == "tbf"
    }
