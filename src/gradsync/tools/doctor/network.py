"""Checks of the network: interfaces, the one that Gloo will use, ports, and a real all-reduce between processes.

This file is also what those processes run: ``python network.py BACKEND SECONDS``.
"""

import errno
import fcntl
import json
import os
import re
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from gradsync.base.environment import DEFAULT_PORT, LOOPBACK
from gradsync.communicator import Communicator, choose_communicator, fit_communicator
from gradsync.observe.charts.numbers import size
from gradsync.tools.doctor.checks import KIB, MIB, Finding, Status, judged, place_of
from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan
from gradsync.tools.launch import Failure, RankProcesses, become, standalone

__all__ = [
    *("Interface", "LinkTest", "check_gloo_interface", "check_interfaces", "check_ports", "list_interfaces"),
    "measured",
]

NET = Path("/sys/class/net")
INET6 = Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915
IFF_UP = 1
LINK_LOCAL = "fe80:"

READY = "ready\n"
# The numbers of repeats keep all of it well under a second on a link of 1 GB/s.
REPEATS = {4 * KIB: 20, 256 * KIB: 20, 4 * MIB: 8, 32 * MIB: 4}
WARM_UP = 2

# Loopback moves 4 KiB in a fraction of a millisecond and some GB/s. Far from that, something else has the cores.
SLOW_SECONDS = 5e-3
SLOW_BYTES_PER_SECOND = {"gloo": 0.2e9, "nccl": 1e9}
SHARING_SECONDS = 30.0
RANK_SCRIPT = Path(__file__)


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of this machine."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    megabits: int | None

    @property
    def is_loopback(self) -> bool:
        return any(address == "::1" or address.startswith("127.") for address in self.addresses)

    def described(self, *, with_addresses: bool) -> str:
        speed = "" if self.megabits is None else f" {self.megabits / 1000:g} Gb/s"
        addresses = f" {', '.join(self.addresses) or 'no address'}" if with_addresses else ""
        return f"{self.name} {'up' if self.up else 'down'}{speed}{addresses}"


def list_interfaces() -> tuple[Interface, ...]:
    """The interfaces that are up or have an address: the others are of no use to anybody."""
    six: dict[str, list[str]] = {}
    lines = INET6.read_text().splitlines() if INET6.exists() else []
    for address, *_, name in (line.split() for line in lines):
        six.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    found = []
    for _, name in socket.if_nameindex():
        addresses = (*_ipv4_address(name), *six.get(name, ()))
        flags = NET / name / "flags"
        up = bool(int(flags.read_text(), 16) & IFF_UP) if flags.exists() else True
        speed = 0
        with suppress(OSError, ValueError):  # virtual ones have no speed, and say so by an error
            speed = int((NET / name / "speed").read_text())
        found.append(Interface(name=name, addresses=addresses, up=up, megabits=speed if speed > 0 else None))
    return tuple(interface for interface in found if interface.up or interface.addresses)


def _ipv4_address(name: str) -> tuple[str, ...]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has none
            return ()
    return (socket.inet_ntoa(answer[20:24]),)


def check_interfaces(interfaces: tuple[Interface, ...]) -> Finding:
    detail = "; ".join(each.described(with_addresses=True) for each in interfaces) or "none"
    public = "; ".join(each.described(with_addresses=False) for each in interfaces) or "none"
    deaf = not any(each.is_loopback and each.up for each in interfaces)
    raise_it = "ip link set lo up: ranks on one machine meet on loopback"
    alone = "none, if this is the only machine; others can be reached only through an interface beside loopback"
    faults = [(deaf, Status.FAIL, raise_it), (_first_useful(interfaces) is None, Status.WARN, alone)]
    return judged("interfaces", detail, *faults, public=public)


def _first_useful(interfaces: tuple[Interface, ...]) -> Interface | None:
    """The interface by which other machines may be reached: the fastest, and of equal ones the first."""
    outside = [each for each in interfaces if each.up and not each.is_loopback]
    useful = [each for each in outside if any(not address.startswith(LINK_LOCAL) for address in each.addresses)]
    return max(useful, key=lambda each: each.megabits or 0, default=None)


def check_gloo_interface(interfaces: tuple[Interface, ...], variables: Mapping[str, str]) -> Finding:
    """Gloo takes what GLOO_SOCKET_IFNAME names, else the address of the host's name, else loopback."""
    named = [name.strip() for name in variables.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    if named:
        return _named_interfaces(interfaces, named)
    host, addresses = socket.gethostname(), list[str]()
    with suppress(OSError):
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    holders = [each for each in interfaces if set(each.addresses) & set(addresses)]
    outside = [each.name for each in holders if not each.is_loopback]
    if outside:
        return judged("gloo", f"Gloo will use {outside[0]}, which has the address of this host's name")
    if any(each.is_loopback for each in holders) or any(address.startswith("127.") for address in addresses):
        public = "the host's name stands for a loopback address"
    elif addresses:
        public = "the host's name stands for an address that is not on this machine"
    else:
        public = "the host's name stands for no address"
    public += ", so Gloo will use loopback"
    detail = public.replace("the host's name", f"the host's name, {host},", 1)
    better, place = _first_useful(interfaces), place_of(variables)
    setting = f"export GLOO_SOCKET_IFNAME={better.name}" if better else "set GLOO_SOCKET_IFNAME to a wired interface"
    apart = place.local_world_size < place.world_size, Status.FAIL, f"ranks on other nodes cannot reach that: {setting}"
    here = True, Status.WARN, f"nothing on one machine; for ranks on several: {setting}"
    return judged("gloo", detail, apart, here, public=public)


def _named_interfaces(interfaces: tuple[Interface, ...], named: list[str]) -> Finding:
    usable = {each.name for each in interfaces if each.up and each.addresses}
    wrong = [name for name in named if name not in usable]
    if not wrong:
        return judged("gloo", f"Gloo will use {', '.join(named)}, as GLOO_SOCKET_IFNAME says")
    detail = f"GLOO_SOCKET_IFNAME names {', '.join(wrong)}, which is not an interface that is up and has an address"
    fix = f"set it to one of these, or unset it: {', '.join(sorted(usable)) or 'none'}"
    return judged("gloo", detail, (True, Status.FAIL, fix))


def check_ports() -> Finding:
    try:
        socket.create_server((LOOPBACK, 0)).close()
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "an unknown error")
        fix = "ranks meet at one: see that lo is up (ip link set lo up) and that a sandbox or firewall allows it"
        return judged("ports", f"no port can be opened on loopback: {code}", (True, Status.FAIL, fix))
    taken = not (_is_free(socket.AF_INET, "0.0.0.0") and _is_free(socket.AF_INET6, "::"))
    detail = f"loopback can be listened on; port {DEFAULT_PORT}, the default, is {'taken' if taken else 'free'}"
    fix = "another job? Use torchrun --standalone, or set MASTER_PORT to a free port for all ranks"
    return judged("ports", detail, (taken, Status.WARN, fix))


def _is_free(family: socket.AddressFamily, address: str) -> bool:
    try:
        socket.create_server((address, DEFAULT_PORT), family=family).close()
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # a machine without IPv6 has no port taken there
    return True


# -- the speed of a link ----------------------------------------------------------------------------------------------


class LinkTest:
    """The ranks of one measurement. They start at once, and :meth:`finding` waits for what they have measured.

    ``stack`` ends them and closes their files.
    """

    def __init__(
        self, backend: str, ranks: int, timeout: float, stack: ExitStack, sharing: SharedGpuPlan | None = None
    ) -> None:
        self.name = f"{backend} link"
        # Under MPS, CUDA takes longer to start.
        timeout = timeout if sharing is None else max(timeout, SHARING_SECONDS)
        self._backend, self._ranks, self._timeout, self._sharing = backend, ranks, timeout, sharing
        self._deadline = time.time() + timeout
        # Without names, so that none is left behind.
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2 * ranks)]  # noqa: SIM115 (it closes them)
        self._outputs, self._errors = files[:ranks], files[ranks:]
        places = stack.enter_context(standalone(ranks))
        if sharing is not None:
            places = stack.enter_context(SharedGpu(sharing)).share(places)
        self._processes = stack.enter_context(RankProcesses(grace=0))
        command = [sys.executable, "-P", str(RANK_SCRIPT), backend, str(timeout)]
        for place, output, error in zip(places, self._outputs, self._errors, strict=True):
            self._processes.start(place, partial(become, sys.executable, command, output, error))

    def finding(self) -> Finding:
        """Waits until all have ended, one has failed or the time is over."""
        try:
            failure = self._processes.wait(self._deadline - time.time())
        except TimeoutError:
            return self._late()
        if failure is not None:
            return self._failed(failure)
        read = json.loads(_text(self._outputs[0]).removeprefix(READY))
        return measured(self._backend, self._ranks, sharing=self._sharing, **read)

    def _failed(self, failure: Failure) -> Finding:
        rank, code = failure.place.rank, failure.code
        lines = _text(self._errors[rank]).strip().splitlines()
        what = f"signal {-code}" if code < 0 else f"exit code {code}"
        # The last line of a traceback is the exception; where in torch's sources it was helps nobody here.
        reason = re.sub(r"\[enforce fail at [^\]]*\] ", "", lines[-1].strip()) if lines else what
        detail = f"rank {rank} of {self._ranks} failed: {reason}"
        fix = "see the lines on interfaces, gloo and ports" if self._backend == "gloo" else "run with NCCL_DEBUG=INFO"
        public = f"rank {rank} of {self._ranks} failed with {what}"
        return judged(self.name, detail, (True, Status.FAIL, fix), public=public)

    def _late(self) -> Finding:
        """Ranks that have had no time yet for the link show nothing about it."""
        # The ranks write that they are ready, and then nothing before they have finished.
        ready_at = max(os.fstat(output.fileno()).st_mtime for output in self._outputs)
        ready = all(_text(output).startswith(READY) for output in self._outputs)
        if not ready or self._deadline - ready_at < self._timeout / 2:
            detail = f"not measured: after {self._timeout:g} s the ranks had barely started"
            fix = "the machine is busy or slow: gradsync doctor --timeout 60"
            return judged(self.name, detail, (True, Status.WARN, fix))
        detail = f"{self._ranks} ranks had not finished their all-reduces after {self._timeout:g} s"
        fix = "they may not reach each other: see interfaces, gloo and ports. Else: gradsync doctor --timeout 60"
        return judged(self.name, detail, (True, Status.FAIL, fix))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def measured(
    backend: str,
    ranks: int,
    seconds: Mapping[str, float],
    *,
    sharing: SharedGpuPlan | None = None,
    choice: str = "",
    chosen: Mapping[str, float] | None = None,
) -> Finding:
    """The finding on measured ``seconds`` by bytes. Bandwidth is that of the algorithm: bytes of the tensor by time.

    ``choice`` is the transport gradsync would take between such ranks, and ``chosen`` its seconds. Times of ranks that
    share a GPU are shown, and not judged.
    """
    name = f"{backend} link"
    if ranks == 1:
        return judged(name, f"{backend.upper()} starts and reduces; with a single GPU there is no link to measure")
    times = {int(nbytes): value for nbytes, value in seconds.items()}
    lines = [f"all-reduce between {ranks} ranks", *([] if sharing is None else [str(sharing)]), *_rows(times)]
    if chosen is not None:
        lines += [f"gradsync takes {choice}", *_rows({int(nbytes): value for nbytes, value in chosen.items()})]
    latency, bandwidth = times[min(times)], max(nbytes / value for nbytes, value in times.items() if nbytes >= MIB)
    slow = sharing is None and (latency > SLOW_SECONDS or bandwidth < SLOW_BYTES_PER_SECOND[backend])
    fix = "that is slow for one machine: see what else uses the cores (top), and measure again"
    return judged(name, "\n".join(lines), (slow, Status.WARN, fix))


def _rows(times: Mapping[int, float]) -> list[str]:
    return [
        f"{size(nbytes):>7}  {value * 1e3:8.3f} ms  {nbytes / value / 1e9:7.3f} GB/s" for nbytes, value in times.items()
    ]


# -- a rank -----------------------------------------------------------------------------------------------------------


def be_rank() -> None:
    """Measure as one rank, which has torchrun's environment. Rank 0 prints the median seconds by bytes as JSON.

    Whatever goes wrong is an exception, whose last line the doctor shows.
    """
    backend, seconds = sys.argv[1:]
    print(READY, end="", flush=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=float(seconds)))
    group = choose_communicator()
    result: dict[str, Any] = {"seconds": _median_seconds(group, device)}
    if backend == "gloo":
        choice = fit_communicator(group, device)
        result |= {"choice": str(choice), "chosen": _median_seconds(choice.communicator, device)}
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


def _median_seconds(communicator: Communicator, device: torch.device) -> dict[int, float]:
    """The median seconds of an all-reduce, by bytes."""
    medians, ranks = {}, communicator.world_size
    for nbytes, repeats in REPEATS.items():
        readings = []
        tensor = communicator.allocate(nbytes // 4, torch.float32, device)
        for _ in range(WARM_UP + repeats):
            tensor.fill_(1.0)
            dist.barrier()
            _wait_for(device)
            started = time.perf_counter()
            communicator.all_reduce(tensor).wait()
            _wait_for(device)
            readings.append(time.perf_counter() - started)
            if not bool((tensor == ranks).all()):
                raise ArithmeticError(f"an all-reduce of ones over {ranks} ranks gave {tensor.min()} to {tensor.max()}")
        medians[nbytes] = statistics.median(readings[WARM_UP:])
    return medians


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    be_rank()
