"""A real all-reduce of several sizes between processes of this machine, with its time and bandwidth.

This file is also what the processes run: ``python wire.py BACKEND SECONDS``.
"""

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from gradsync.communicator import Communicator, choose_communicator, fit_communicator
from gradsync.tools.doctor.finding import KIB, MIB, Finding, Status, judged, size
from gradsync.tools.lab import SharedGpu, SharedGpuPlan
from gradsync.tools.launch import Failure, RankProcesses, become, standalone

__all__ = ["Wire", "be_rank", "measured"]

READY = "ready\n"
# The numbers of repeats keep all of it well under a second on a wire of 1 GB/s.
REPEATS = {4 * KIB: 20, 256 * KIB: 20, 4 * MIB: 8, 32 * MIB: 4}
WARM_UP = 2

# Loopback moves 4 KiB in a fraction of a millisecond and some GB/s. Far from that, something else has the cores.
SLOW_SECONDS = 5e-3
SLOW_BYTES_PER_SECOND = {"gloo": 0.2e9, "nccl": 1e9}
SHARING_SECONDS = 30.0
RANK_SCRIPT = Path(__file__)


class Wire:
    """The ranks of one measurement. They start at once, and :meth:`finding` waits for what they have measured.

    ``stack`` ends them and closes their files.
    """

    def __init__(
        self, backend: str, ranks: int, timeout: float, stack: ExitStack, sharing: SharedGpuPlan | None = None
    ) -> None:
        self.name = f"{backend} wire"
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
        """Ranks that have had no time yet for the wire say nothing about it."""
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
    """``seconds`` by bytes. Bandwidth is that of the algorithm: bytes of the tensor by time.

    ``choice`` is the wire that gradsync would take between such ranks, and ``chosen`` its seconds. Times of ranks that
    share a GPU are shown, and not judged.
    """
    name = f"{backend} wire"
    if ranks == 1:
        return judged(name, f"{backend.upper()} starts and reduces; with a single GPU there is no wire to measure")
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
    wire = choose_communicator()
    result: dict[str, Any] = {"seconds": _median_seconds(wire, device)}
    if backend == "gloo":
        choice = fit_communicator(wire, device)
        result |= {"choice": str(choice), "chosen": _median_seconds(choice.communicator, device)}
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


def _median_seconds(wire: Communicator, device: torch.device) -> dict[int, float]:
    """By bytes."""
    medians, ranks = {}, wire.world_size
    for nbytes, repeats in REPEATS.items():
        readings = []
        tensor = wire.allocate(nbytes // 4, torch.float32, device)
        for _ in range(WARM_UP + repeats):
            tensor.fill_(1.0)
            dist.barrier()
            _wait_for(device)
            started = time.perf_counter()
            wire.all_reduce(tensor).wait()
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
