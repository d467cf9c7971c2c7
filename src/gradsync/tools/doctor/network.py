"""Checks of the network: its interfaces, the one that Gloo will use, and the ports for the rendezvous."""

import errno
import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradsync.base.environment import DEFAULT_PORT, LOOPBACK
from gradsync.tools.doctor.finding import Finding, Status, judged, place_of

__all__ = ["Interface", "check_gloo_interface", "check_interfaces", "check_ports", "list_interfaces"]

NET = Path("/sys/class/net")
INET6 = Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915
IFF_UP = 1
LINK_LOCAL = "fe80:"


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
    """Those that are up or have an address: the others are of no use to anybody."""
    six = _ipv6_addresses()
    found = []
    for _, name in socket.if_nameindex():
        addresses = (*_ipv4_address(name), *six.get(name, ()))
        found.append(Interface(name=name, addresses=addresses, up=_is_up(name), megabits=_megabits(name)))
    return tuple(interface for interface in found if interface.up or interface.addresses)


def _ipv4_address(name: str) -> tuple[str, ...]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has none
            return ()
    return (socket.inet_ntoa(answer[20:24]),)


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines = INET6.read_text().splitlines() if INET6.exists() else []
    for address, *_, name in (line.split() for line in lines):
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found


def _is_up(name: str) -> bool:
    path = NET / name / "flags"
    return bool(int(path.read_text(), 16) & IFF_UP) if path.exists() else True


def _megabits(name: str) -> int | None:
    try:
        speed = int((NET / name / "speed").read_text())
    except (OSError, ValueError):  # virtual ones have no speed, and say so by an error
        return None
    return speed if speed > 0 else None


def check_interfaces(interfaces: tuple[Interface, ...]) -> Finding:
    detail = "; ".join(each.described(with_addresses=True) for each in interfaces) or "none"
    public = "; ".join(each.described(with_addresses=False) for each in interfaces) or "none"
    deaf = not any(each.is_loopback and each.up for each in interfaces)
    raise_it = "ip link set lo up: ranks on one machine meet on loopback"
    alone = "none, if this is the only machine; others can be reached only through an interface beside loopback"
    faults = [(deaf, Status.FAIL, raise_it), (_first_useful(interfaces) is None, Status.WARN, alone)]
    return judged("interfaces", detail, *faults, public=public)


def _first_useful(interfaces: tuple[Interface, ...]) -> Interface | None:
    """Through which other machines may be reached: the fastest, and of equal ones the first."""
    outside = [each for each in interfaces if each.up and not each.is_loopback]
    useful = [each for each in outside if any(not address.startswith(LINK_LOCAL) for address in each.addresses)]
    return max(useful, key=lambda each: each.megabits or 0, default=None)


def check_gloo_interface(interfaces: tuple[Interface, ...], variables: Mapping[str, str]) -> Finding:
    """Gloo takes what GLOO_SOCKET_IFNAME names, else the address of the host's name, else loopback."""
    named = [name.strip() for name in variables.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    if named:
        return _named_interfaces(interfaces, named)
    host = socket.gethostname()
    addresses = _addresses_of(host)
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


def _addresses_of(host: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


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
