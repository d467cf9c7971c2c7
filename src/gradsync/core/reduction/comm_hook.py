"""Runs torch's communication hooks, unchanged: ``hook(state, bucket) -> Future[Tensor]``.

The hook sees the bucket as torch's ``GradBucket`` shows it and is responsible for the division, as under torch. The
flags do not pass through it (a low-rank hook would not preserve them), so they are sent in a collective of their own.

A hook with a state of its own, such as torch's PowerSGD, keeps it by the index of the bucket. As under torch, buckets
are rebuilt once, after the first window; from then on they stay as they are. A saved state belongs to the layout of
that time: load the engine's with it (``model.synchronizer.load_state_dict``, or ``gradsync.checkpoint``).

[Note: chained collectives] A hook may start further collectives from the callbacks of its futures, as PowerSGD does. On
the CPU those run in Gloo's threads, in any order: two buckets at once would pair the collectives of one with those of
the other. So on the CPU a bucket's hook is called when the previous one has finished, unless it is known to send only
one message. On GPUs futures are done when their work is queued, and callbacks run in order.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradsync.base.errors import MisuseError, NotCallableError
from gradsync.communicator import Communicator, Handle, Stage
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.base import Reduction

__all__ = ["CommHook", "GradBucket", "Hook"]

Hook = Callable[[Any, Any], Any]

# Hooks with one collective per bucket, and nothing after it. See [Note: chained collectives].
SINGLE = {
    ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", name)
    for name in ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
}


class GradBucket:
    """A bucket with the methods of ``torch.distributed.GradBucket``, which has no constructor of its own."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.payload

    def index(self) -> int:
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._bucket.views_of(self._buffer)

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        return self._is_last


class _FutureHandle:
    """A handle that waits for the hook's future and copies its tensor to where the gradients belong."""

    def __init__(self, future: "torch._C.Future[Any]", bucket: Bucket, hook_name: str) -> None:
        self._future, self._bucket, self._hook_name = future, bucket, hook_name

    def wait(self) -> None:
        result = self._future.wait()
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        payload = self._bucket.payload
        if not isinstance(result, torch.Tensor) or result.numel() != payload.numel():
            came = f"{type(result).__name__}" + (
                f" of {result.numel()} elements" if isinstance(result, torch.Tensor) else ""
            )
            raise MisuseError(
                f"the future of the communication hook {self._hook_name!r} must hold a tensor of "
                f"{payload.numel()} elements like bucket {self._bucket.index}'s buffer, got {came}"
            )
        if result.data_ptr() != payload.data_ptr() or result.dtype != payload.dtype:
            payload.copy_(result.view(-1))

    def done(self) -> bool:
        return self._future.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._future.then(lambda _: callback())

    def then(self, stage: Stage) -> Handle:
        raise MisuseError(
            f"the collectives of the communication hook {self._hook_name!r} have no place in the order of a "
            "communicator, so that no stage can follow them. Wait for the bucket first"
        )

    def describe(self) -> str:
        return f"the communication hook {self._hook_name!r} on bucket {self._bucket.index}"


class CommHook(Reduction):
    """Runs one of torch's communication hooks as a reduction."""

    carries_tail = False

    def __init__(self, state: Any, hook: Hook) -> None:
        if not callable(hook):
            raise NotCallableError(f"a communication hook must be callable as hook(state, bucket), got {hook!r}")
        self._state = state
        self._hook = hook
        self._name = getattr(hook, "__name__", type(hook).__name__)
        self._started = False
        self._chains = (getattr(hook, "__module__", None), self._name) not in SINGLE
        # One of torch's futures, whose type cannot be named here.
        self._running: Any = None

    def __repr__(self) -> str:
        return f"CommHook({self._name})"

    @property
    def name(self) -> str:
        """The hook's own full name."""
        return str(getattr(self._hook, "__qualname__", self._name))

    @property
    def keeps_layout(self) -> bool:
        # torch's simple hooks take a process group as their state: then there is none to save.
        if self._state is None or isinstance(self._state, dist.ProcessGroup):
            return False
        return self._started or _has_memory(self._state)

    def state_dict(self) -> dict[str, Any]:
        """What the hook's state saves of itself, if it can: torch's own can only be pickled, and are left out."""
        saved: dict[str, Any] = self._state.state_dict() if hasattr(self._state, "state_dict") else {}
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self._state, "load_state_dict"):
            self._state.load_state_dict(state)

    def prescale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return 1.0

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        self._started = True
        former, self._running = self._running, None
        if former is not None and self._chains and bucket.buffer.device.type == "cpu":
            # Only wait for the hook to end. Its result is taken when the bucket is finished.
            former.wait()
        is_last = bucket.plan.control > 0
        future = self._hook(self._state, GradBucket(bucket, is_last=is_last))
        if not isinstance(future, torch._C.Future):  # what work.get_future().then(...) returns
            raise MisuseError(
                f"the communication hook {self._name!r} must return a torch.futures.Future[torch.Tensor], "
                f"got {type(future).__name__}. Return work.get_future(), or a future with set_result(tensor)"
            )
        self._running = future
        return _FutureHandle(future, bucket, self._name)


def _has_memory(state: Any) -> bool:
    """Whether a hook's state already holds data per bucket, as one does that was saved and loaded."""
    return any(isinstance(value, dict) and value for value in getattr(state, "__dict__", {}).values())
