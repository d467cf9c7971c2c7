"""A real all-reduce between processes of this machine, of several sizes, with its time and bandwidth."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradsync.doctor.finding import MIB, Finding, Status, size
from gradsync.doctor.wire_rank import READY

__all__ = ["Wire", "measured"]

# Loopback moves 4 KiB in a fraction of a millisecond and some GB/s. Far from that, something else has the cores.
SLOW_SECONDS = 5e-3
SLOW_BYTES_PER_SECOND = {"gloo": 0.2e9, "nccl": 1e9}
# What would make the processes take themselves for ranks of an outer launch.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
POLL_SECONDS = 0.02
# Run as a script: it needs torch, and not the time that the rest of gradsync takes to import.
RANK_SCRIPT = Path(__file__).with_name("wire_rank.py")


class Wire:
    """The ranks of one measurement. They start at once, and :meth:`finding` waits for what they have measured."""

    def __init__(self, backend: str, ranks: int, folder: Path, timeout: float) -> None:
        self.name = f"{backend} wire"
        self._backend, self._ranks, self._timeout = backend, ranks, timeout
        self._deadline = time.monotonic() + timeout
        self._outputs = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(ranks)]
        self._processes = [self._start(rank, folder / "store") for rank in range(ranks)]
        self._ready_at: float | None = None

    def _start(self, rank: int, store: Path) -> "subprocess.Popen[bytes]":
        variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        numbers = (str(rank), str(self._ranks), str(store), str(self._timeout))
        output, error = self._outputs[rank]
        with output.open("wb") as stdout, error.open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-P", str(RANK_SCRIPT), self._backend, *numbers],
                env=variables | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def finding(self) -> Finding:
        """Waits until all have ended, one has failed or the time is over."""
        while True:
            codes = [process.poll() for process in self._processes]
            if any(codes):
                return self._failed(codes)
            if all(code == 0 for code in codes):
                return measured(self._backend, self._ranks, **self._result())
            if self._ready_at is None and all(output.read_text().startswith(READY) for output, _ in self._outputs):
                self._ready_at = time.monotonic()
            if time.monotonic() > self._deadline:
                return self._late()
            time.sleep(POLL_SECONDS)

    def _result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self._outputs[0][0].read_text().removeprefix(READY))
        return result

    def _failed(self, codes: list[int | None]) -> Finding:
        rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
        lines = self._outputs[rank][1].read_text(errors="replace").strip().splitlines()
        what = f"signal {-code}" if code < 0 else f"exit code {code}"
        # The last line of a traceback is the exception; where in torch's sources it was helps nobody here.
        reason = re.sub(r"\[enforce fail at [^\]]*\] ", "", lines[-1].strip()) if lines else what
        detail = f"rank {rank} of {self._ranks} failed: {reason}"
        fix = "see the lines on interfaces, gloo and ports" if self._backend == "gloo" else "run with NCCL_DEBUG=INFO"
        public = f"rank {rank} of {self._ranks} failed with {what}"
        return Finding(name=self.name, status=Status.FAIL, detail=detail, fix=fix, public=public)

    def _late(self) -> Finding:
        """Ranks that have had no time yet for the wire say nothing about it."""
        if self._ready_at is None or self._deadline - self._ready_at < self._timeout / 2:
            return Finding(
                name=self.name,
                status=Status.WARN,
                detail=f"not measured: after {self._timeout:g} s the ranks had barely started",
                fix="the machine is busy or slow: gradsync doctor --timeout 60",
            )
        return Finding(
            name=self.name,
            status=Status.FAIL,
            detail=f"{self._ranks} ranks had not finished their all-reduces after {self._timeout:g} s",
            fix="they may not reach each other: see interfaces, gloo and ports. Else: gradsync doctor --timeout 60",
        )

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    @classmethod
    @contextmanager
    def of(cls, backend: str, ranks: int, timeout: float) -> "Iterator[Wire]":
        folder = Path(tempfile.mkdtemp(prefix="gradsync_doctor_"))
        wire = None
        try:
            wire = cls(backend, ranks, folder, timeout)
            yield wire
        finally:
            if wire is not None:
                wire.close()
            shutil.rmtree(folder, ignore_errors=True)


def measured(
    backend: str,
    ranks: int,
    seconds: Mapping[str, float],
    choice: str = "",
    chosen: Mapping[str, float] | None = None,
) -> Finding:
    """``seconds`` by bytes. Bandwidth is that of the algorithm: bytes of the tensor by time.

    ``choice`` is the wire that gradsync would take between such ranks, and ``chosen`` its seconds.
    """
    if ranks == 1:
        detail = f"{backend.upper()} starts and reduces; with a single GPU there is no wire to measure"
        return Finding(name=f"{backend} wire", status=Status.PASS, detail=detail)
    times = {int(nbytes): value for nbytes, value in seconds.items()}
    lines = [f"all-reduce between {ranks} ranks", *_rows(times)]
    if chosen is not None:
        lines += [f"gradsync takes {choice}", *_rows({int(nbytes): value for nbytes, value in chosen.items()})]
    detail = "\n".join(lines)
    latency, bandwidth = times[min(times)], max(nbytes / value for nbytes, value in times.items() if nbytes >= MIB)
    if latency > SLOW_SECONDS or bandwidth < SLOW_BYTES_PER_SECOND[backend]:
        fix = "that is slow for one machine: see what else uses the cores (top), and measure again"
        return Finding(name=f"{backend} wire", status=Status.WARN, detail=detail, fix=fix)
    return Finding(name=f"{backend} wire", status=Status.PASS, detail=detail)


def _rows(times: Mapping[int, float]) -> list[str]:
    return [
        f"{size(nbytes):>7}  {value * 1e3:8.3f} ms  {nbytes / value / 1e9:7.3f} GB/s" for nbytes, value in times.items()
    ]
