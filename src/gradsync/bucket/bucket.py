"""One flat buffer of gradients, a view per parameter, and its life.

::

    FILLING ──all chunks full──▶ READY ──start──▶ REDUCING ──finish──▶ REDUCED ──reopen──▶ FILLING

There is one copy of the gradients, here, and the wire reads it where it lies. Chunks bring the gradients in; see
:mod:`gradsync.bucket.chunk`. The layout of the buffer is drawn in :mod:`gradsync.bucket.layout`.
"""

import enum
from collections.abc import Callable, Sequence

import torch

from gradsync.bucket.chunk import LATE_REMEDY, Chunk
from gradsync.bucket.layout import BucketPlan, ParameterSpec, Slot
from gradsync.communicator import Communicator
from gradsync.errors import LateGradientError

__all__ = ["Bucket", "BucketState"]

# A chunk has at most this many bytes, or a single gradient. On an accelerator every operation is a kernel, which pays
# only when it is large; and there the peak of memory comes when backward begins and hardly a gradient is there.
CHUNK_BYTES = 256 * 1024
ACCELERATOR_CHUNK_BYTES = 32 * 1024 * 1024


class BucketState(enum.Enum):
    """Where in its life a bucket is."""

    FILLING = "filling"
    READY = "ready"
    REDUCING = "reducing"
    REDUCED = "reduced"


class Bucket:
    """The gradients of the parameters in one :class:`BucketPlan`."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        communicator: Communicator,
    ) -> None:
        self.index = plan.index
        self.plan = plan
        self.parameters = [parameters[slot.parameter] for slot in plan.slots]
        self.specs = [specs[slot.parameter] for slot in plan.slots]
        self.buffer = communicator.allocate(plan.numel, plan.dtype, plan.device)
        # The same memory with a version counter of its own: what the wire writes is not taken for a late gradient.
        self._on_wire = self.buffer.data
        self.payload = self.buffer[: plan.payload]
        self.tail = self.buffer[plan.payload :]
        self.flags = self.tail[: len(plan.slots)]
        self.ballot = self.tail[len(plan.slots) :]
        self.views = [_view(self.buffer, slot, spec) for slot, spec in zip(plan.slots, self.specs, strict=True)]
        self._starts = [slot.offset for slot in plan.slots] + [plan.payload]
        self.chunks = [self._make_chunk(first, end) for first, end in self._cut()]
        self.state = BucketState.FILLING
        self._absent: frozenset[int] = frozenset()
        self._compacted: torch.Tensor | None = None
        # Whether gradients land by sight, so that only the version can show one that comes too late.
        self.watched = False
        self._version = 0

    def _cut(self) -> list[tuple[int, int]]:
        """Where chunks begin and end, in slots. A slot too large for a chunk is one by itself: it waits for nobody."""
        nbytes = CHUNK_BYTES if self.plan.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
        most = nbytes // self.plan.dtype.itemsize
        runs: list[tuple[int, int]] = []
        for slot in range(len(self.plan.slots)):
            first = runs[-1][0] if runs else slot
            if runs and self._starts[slot + 1] - self._starts[first] <= most:
                runs[-1] = (first, slot + 1)
            else:
                runs.append((slot, slot + 1))
        return runs

    def _make_chunk(self, first: int, end: int) -> Chunk:
        return Chunk(
            self.parameters[first:end],
            [spec.name for spec in self.specs[first:end]],
            self.views[first:end],
            self.buffer[self._starts[first] : self._starts[end]],
            first,
        )

    def before_gather(self, callback: Callable[[Sequence[torch.nn.Parameter]], None]) -> None:
        """Have ``callback`` called with the parameters of each chunk before its gradients are gathered."""
        for chunk in self.chunks:
            chunk.before_gather = callback

    def place_of(self, slot: int) -> tuple[Chunk, int]:
        """The chunk that holds ``slot``, and the slot's number there."""
        chunk = next(chunk for chunk in reversed(self.chunks) if chunk.first <= slot)
        return chunk, slot - chunk.first

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where each gradient lies in ``buffer``, which is the payload or like it in another dtype."""
        if buffer is self.payload:
            return list(self.views)
        return [_view(buffer, slot, spec) for slot, spec in zip(self.plan.slots, self.specs, strict=True)]

    def reopen(self) -> None:
        """Make ready for the next backward."""
        for chunk in self.chunks:
            chunk.reopen()
        self._absent = frozenset()
        self._compacted = None
        self.state = BucketState.FILLING

    # -- filling -----------------------------------------------------------------------------------------------

    def note_full_chunk(self) -> bool:
        """A chunk has become full: True when the bucket has become so by it."""
        if self.state is BucketState.FILLING and all(chunk.full for chunk in self.chunks):
            self.state = BucketState.READY
            return True
        return False

    def gather(self) -> None:
        """Bring in whatever gradients there are, and let them lie."""
        for chunk in self.chunks:
            chunk.gather()

    def settle(self, scale: float, chunks: Sequence[Chunk] | None = None) -> None:
        """Bring in the gradients of ``chunks``, or of all, multiplied by ``scale``."""
        if self.watched and self.touched and any(chunk.settled for chunk in self.chunks):
            self.refuse_touched()
        for chunk in self.chunks if chunks is None else chunks:
            chunk.settle(scale)
        self.mark_version()

    # -- the wire ----------------------------------------------------------------------------------------------

    def announce_absent(self, slots: frozenset[int]) -> None:
        """All ranks know that nobody will have gradients for these slots: they are left off the wire.

        The bucket no longer waits for them. A gradient that comes all the same is refused.
        """
        self._absent = slots
        for chunk in self.chunks:
            inside = range(chunk.first, chunk.first + len(chunk.parameters))
            chunk.expect_absent(frozenset(slot - chunk.first for slot in slots if slot in inside))
        self.note_full_chunk()

    @property
    def has_wire(self) -> bool:
        """False when there is nothing to send: every slot is absent and the ballot rides elsewhere."""
        return len(self._absent) < len(self.views) or self.plan.ballot > 0

    @property
    def empty(self) -> list[int]:
        """Slots without a gradient of this rank."""
        return [chunk.first + slot for chunk in self.chunks for slot in chunk.empty]

    @torch.no_grad()
    def load_tail(self, *, failed_rank: int | None = None) -> None:
        """Write the flags, and the vote of this rank where the ballot is here."""
        self.flags.fill_(1)
        empty = self.empty
        if empty:
            self.flags[empty] = 0
        if self.plan.ballot:
            self.ballot.zero_()
            if failed_rank is not None:
                self.ballot[failed_rank] = 1

    @torch.no_grad()
    def wire(self) -> torch.Tensor:
        """The flat tensor that crosses the wire: the whole buffer, or what is left of it without absent slots."""
        if not self._absent:
            return self._on_wire
        if self._compacted is None:
            self._compacted = torch.cat([self.buffer[start:end] for start, end in self._segments()])
        return self._compacted

    def _segments(self) -> list[tuple[int, int]]:
        """Runs of the buffer that are sent, the tail included."""
        segments: list[tuple[int, int]] = []
        for slot in range(len(self.plan.slots)):
            if slot in self._absent:
                continue
            start, end = self._starts[slot], self._starts[slot + 1]
            if segments and segments[-1][1] == start:
                start = segments.pop()[0]
            segments.append((start, end))
        tail = (self.plan.payload, self.plan.numel)
        if segments and segments[-1][1] == tail[0]:
            tail = (segments.pop()[0], tail[1])
        return [*segments, tail]

    def mark_version(self) -> None:
        """From now on nobody but the engine may write into the bucket."""
        self._version = self.buffer._version

    @property
    def touched(self) -> bool:
        """Whether anybody has written since :meth:`mark_version`. Autograd does so through the views, which share the
        version counter of the buffer."""
        return self.buffer._version != self._version

    def refuse_touched(self) -> None:
        raise LateGradientError(
            f"a parameter of bucket {self.index} ({self.specs[0].name!r} … {self.specs[-1].name!r}) received a further "
            f"gradient when its gradient was already on its way to the other ranks. {LATE_REMEDY}"
        )

    @torch.no_grad()
    def finish(self) -> None:
        """After the reduction: parameters that got no gradient here get the mean, if any rank had one."""
        if self._compacted is not None:
            offset = 0
            for start, end in self._segments():
                self.buffer[start:end].copy_(self._compacted[offset : offset + end - start])
                offset += end - start
            self._compacted = None
        empty = self.empty
        if empty and self.has_wire:
            # The only place where the host reads what came over the wire, and only on a rank with unused parameters.
            somebody_has = (self.flags > 0).tolist()
            for slot in empty:
                if somebody_has[slot]:
                    self.parameters[slot].grad = self.views[slot]
        self.state = BucketState.REDUCED


def _view(buffer: torch.Tensor, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    flat = buffer[slot.offset : slot.offset + slot.numel]
    if spec.dtype.is_complex:
        flat = torch.view_as_complex(flat.view(-1, 2))
    return flat.as_strided(spec.shape, spec.stride)
