"""Runs ``ip`` and ``tc``, which make the hosts and shape the links."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

from gradsync.errors import ConfigurationError
from gradsync.lab.errors import LabError

__all__ = ["check_fit", "ip", "ip_json", "ip_lines", "tc_json", "tc_lines"]

# Debian keeps them where only root's PATH looks.
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
SECONDS = 60


def check_fit() -> None:
    """Raise unless this process may make a lab: it needs root, ``ip`` and ``tc``."""
    missing = [program for program in ("ip", "tc") if shutil.which(program, path=SEARCHED) is None]
    if missing:
        raise ConfigurationError(
            f"a lab needs the program {' and '.join(missing)}, which is not installed: apt install iproute2"
        )
    if os.geteuid() != 0:
        raise ConfigurationError(
            f"a lab needs root, because it makes network namespaces; this is user {os.geteuid()}. Use sudo, or a "
            "container with the capabilities NET_ADMIN and SYS_ADMIN"
        )


def ip(*arguments: str, namespace: str | None = None) -> str:
    """One ``ip`` command; its output."""
    return _run("ip", arguments, namespace)


def ip_lines(namespace: str, lines: Iterable[str]) -> None:
    """Several ``ip`` commands in one process; the first that fails raises."""
    _run("ip", ("-batch", "-"), namespace, "\n".join(lines))


def tc_lines(namespace: str, lines: Iterable[str]) -> None:
    """The same with ``tc``."""
    _run("tc", ("-batch", "-"), namespace, "\n".join(lines))


def ip_json(*arguments: str, namespace: str | None = None) -> list[dict[str, Any]]:
    """What an ``ip … show`` tells, as data."""
    answer: list[dict[str, Any]] = json.loads(_run("ip", ("-json", "-details", *arguments), namespace) or "[]")
    return answer


def tc_json(*arguments: str, namespace: str) -> list[dict[str, Any]]:
    """What a ``tc … show`` tells, as data."""
    answer: list[dict[str, Any]] = json.loads(_run("tc", ("-json", *arguments), namespace) or "[]")
    return answer


def _run(program: str, arguments: Iterable[str], namespace: str | None, written: str = "") -> str:
    command = [program, *([] if namespace is None else ["-netns", namespace]), *arguments]
    path = shutil.which(program, path=SEARCHED) or program
    try:
        answer = subprocess.run(
            [path, *command[1:]], input=written, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(command)} did not work: {error}") from error
    if answer.returncode != 0:
        raise LabError(
            f"{' '.join(command)} failed: {answer.stderr.strip() or 'it does not say why'}. A lab needs the "
            "capabilities NET_ADMIN and SYS_ADMIN, and a kernel with network namespaces, veth, bridge and tbf"
        )
    return answer.stdout
