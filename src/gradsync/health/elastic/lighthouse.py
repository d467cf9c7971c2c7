"""Runs torchft's lighthouse, the server that decides who takes part, in this process."""

import importlib
import os
import platform
from typing import Any
from urllib.parse import urlsplit

from gradsync.base.errors import ConfigurationError

__all__ = ["Lighthouse", "require_torchft"]

# A rank that has not been heard of for so long does not count as alive. It is what the others wait for after a loss.
HEARTBEAT_SECONDS = 2.0
TICK_MILLISECONDS = 50
# Of what torchft is built with, which else tells of every request.
LOG_LEVEL = "RUST_LOG"


def require_torchft() -> Any:
    """``torchft.coordination``, or ConfigurationError with the way to it."""
    os.environ.setdefault(LOG_LEVEL, "warn")
    try:
        return importlib.import_module("torchft.coordination")
    except ImportError as error:
        raise ConfigurationError(
            f"elastic ranks need torchft, which says who takes part: pip install 'gradsync[elastic]' ({error}). It "
            f"comes ready for Linux on x86_64; on {platform.machine()} pip may have to build it, with Rust. Without "
            "it, `gradsync train --max-restarts 3` starts all ranks again after a failure, from the newest checkpoint"
        ) from error


class Lighthouse:
    """Runs for as long as this object is held. ``host`` is the address it listens on, and where other ranks find it.

    The others wait ``join_seconds`` for a rank that is alive but does not join; then they continue without it.
    """

    def __init__(self, host: str, *, min_ranks: int, join_seconds: float) -> None:
        bind = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._server: Any = require_torchft().LighthouseServer(
            bind=bind,
            min_replicas=min_ranks,
            join_timeout_ms=int(1000 * join_seconds),
            quorum_tick_ms=TICK_MILLISECONDS,
            heartbeat_timeout_ms=int(1000 * HEARTBEAT_SECONDS),
        )
        # It names itself by the machine's name, which need not lead to the address it listens on.
        port = urlsplit(self._server.address()).port
        self.address = f"http://{bind.removesuffix(':0')}:{port}"

    def close(self) -> None:
        """No rank finds it any more."""
        self._server.shutdown()
