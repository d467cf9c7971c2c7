"""A bucket: one flat buffer of gradients, with a view of it for each parameter.

There is only one copy of the gradients, and the communicator reads it in place. Chunks gather the gradients; see
:mod:`gradsync.core.bucket.chunk`. The layout of the buffer is drawn in :mod:`gradsync.core.bucket.layout`. A bucket is
only memory: the pipeline knows how far its reduction has come, see :mod:`gradsync.core.engine.pipeline`.
"""

from collections.abc import Callable, Sequence

import torch

from gradsync.core.bucket.chunk import Chunk
from gradsync.core.bucket.layout import BucketPlan, ParameterSpec, Slot

__all__ = ["Bucket"]

# The maximum bytes of a chunk, unless it is a single gradient. On an accelerator every operation is a kernel, which is
# worth it only when it is large; and there memory peaks when backward begins, when hardly any gradient exists yet.
CHUNK_BYTES = 256 * 1024
ACCELERATOR_CHUNK_BYTES = 32 * 1024 * 1024


class Bucket:
    """The gradients of the parameters in one :class:`BucketPlan`.

    ``flat`` is the tensor that is sent: the whole buffer, or what is left of it without absent slots.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
    ) -> None:
        self.index = plan.index
        self.plan = plan
        self.parameters = [parameters[slot.parameter] for slot in plan.slots]
        self.specs = [specs[slot.parameter] for slot in plan.slots]
        self.buffer = allocate(plan.numel, plan.dtype, plan.device)
        self.payload = self.buffer[: plan.payload]
        # The same memory with a version counter of its own: writes by the communicator and the engine must not look
        # like a late gradient, or like a user who changed a mean.
        self.flat = self._whole = self.buffer.data
        self.tail = self._whole[plan.payload :]
        self.flags = self.tail[: len(plan.slots)]
        self.control = self.tail[len(plan.slots) :]
        self.views = [_view(self.buffer, slot, spec) for slot, spec in zip(plan.slots, self.specs, strict=True)]
        self._starts = [slot.offset for slot in plan.slots] + [plan.payload]
        self.chunks = [self._make_chunk(first, end) for first, end in self._cut()]
        self.absent: frozenset[int] = frozenset()
        # Of the slots that were empty here in the last window, those for which no rank had a gradient.
        self.unused: frozenset[int] = frozenset()
        self.reopen()

    def __repr__(self) -> str:
        full, scaled = sum(chunk.full for chunk in self.chunks), sum(chunk.scaled for chunk in self.chunks)
        return f"Bucket({self.describe()}; {full} of {len(self.chunks)} chunks full, {scaled} scaled)"

    def describe(self) -> str:
        """A description of this bucket for errors and logs."""
        first, last = self.specs[0].name, self.specs[-1].name
        return f"bucket {self.index}: {first!r} … {last!r}, {self.buffer.nbytes} bytes of {self.plan.dtype}"

    def _cut(self) -> list[tuple[int, int]]:
        """The beginnings and ends of chunks, in slots.

        A slot too large for a chunk has its own: it waits for no other.
        """
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
        slots, names = slice(first, end), [spec.name for spec in self.specs[first:end]]
        memory = self.buffer[self._starts[first] : self._starts[end]]
        return Chunk(self.parameters[slots], names, self.views[slots], memory, self.flags[slots], first)

    def before_gather(self, callback: Callable[[Sequence[torch.nn.Parameter]], None]) -> None:
        """Have ``callback`` called with the parameters of each chunk before its gradients are gathered."""
        for chunk in self.chunks:
            chunk.before_gather = callback

    def place_of(self, slot: int) -> tuple[Chunk, int]:
        """The chunk that holds ``slot``, and the slot's index there."""
        chunk = next(chunk for chunk in reversed(self.chunks) if chunk.first <= slot)
        return chunk, slot - chunk.first

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of ``buffer`` for each gradient; it is the payload, or one like it in a different dtype."""
        if buffer is self.payload:
            return list(self.views)
        return [_view(buffer, slot, spec) for slot, spec in zip(self.plan.slots, self.specs, strict=True)]

    def share(self, rank: int) -> torch.Tensor:
        """The part of the payload that ``rank`` owns, where the layout was planned to be shared out."""
        return self.payload[self.plan.share_of(rank)]

    def reopen(self) -> None:
        """Prepare for the next backward."""
        for chunk in self.chunks:
            chunk.reopen()
        self.flags.fill_(1)
        self.absent = frozenset()
        self.flat = self._whole

    def reclaim_views(self) -> None:
        """Return views that were given other memory: see :meth:`Chunk.reclaim_views`."""
        for chunk in self.chunks:
            chunk.reclaim_views()

    def gather(self) -> None:
        """Gather all gradients that there are, without scaling them."""
        for chunk in self.chunks:
            chunk.gather()

    # -- sending -----------------------------------------------------------------------------------------------

    def announce_absent(self, slots: frozenset[int]) -> None:
        """Leave these slots out of what is sent: all ranks know that none will have gradients for them.

        The bucket no longer waits for them. If a gradient arrives anyway, it is refused.
        """
        self.absent = slots
        for chunk in self.chunks:
            inside = range(chunk.first, chunk.first + len(chunk.parameters))
            chunk.expect_absent(frozenset(slot - chunk.first for slot in slots if slot in inside))

    @property
    def sends(self) -> bool:
        """Whether anything is sent; not if every slot is absent and the control flags are in a different bucket."""
        return len(self.absent) < len(self.views) or self.plan.control > 0

    @property
    def empty(self) -> list[int]:
        """The slots for which this rank has no gradient."""
        return [chunk.first + slot for chunk in self.chunks for slot in chunk.empty]

    @torch.no_grad()
    def compact(self) -> None:
        """Remove absent slots from what is sent."""
        self.flat = torch.cat([self._whole[start:end] for start, end in self._segments()])

    def _segments(self) -> list[tuple[int, int]]:
        """The runs of the buffer that are sent, including the tail."""
        segments: list[tuple[int, int]] = []
        for slot in range(len(self.plan.slots)):
            if slot in self.absent:
                continue
            start, end = self._starts[slot], self._starts[slot + 1]
            if segments and segments[-1][1] == start:
                start = segments.pop()[0]
            segments.append((start, end))
        tail = (self.plan.payload, self.plan.numel)
        if segments and segments[-1][1] == tail[0]:
            tail = (segments.pop()[0], tail[1])
        return [*segments, tail]

    @torch.no_grad()
    def finish(self) -> None:
        """Attach the mean, after the reduction, to parameters that got no gradient here, if any rank had one."""
        if self.flat is not self._whole:
            offset = 0
            for start, end in self._segments():
                self.buffer[start:end].copy_(self.flat[offset : offset + end - start])
                offset += end - start
            self.flat = self._whole
        empty = self.empty
        self.unused = frozenset(empty)
        if empty and self.sends:
            # The only place where the host reads what was received, and only on a rank with unused parameters.
            somebody_has = (self.flags > 0).tolist()
            self.unused = frozenset(slot for slot in empty if not somebody_has[slot])
            for slot in empty:
                if somebody_has[slot]:
                    self.parameters[slot].grad = self.views[slot]


def _view(buffer: torch.Tensor, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    flat = buffer[slot.offset : slot.offset + slot.numel]
    if spec.dtype.is_complex:
        flat = torch.view_as_complex(flat.view(-1, 2))
    return flat.as_strided(spec.shape, spec.stride)
