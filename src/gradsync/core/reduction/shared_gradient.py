"""``SharedGradient``: a gradient of which each rank has only its share of the mean, guarded against misuse.

The rest of the bucket holds this rank's part of a sum, or new parameters. Any number computed from that would be
meaningless, without an error. So the views that are ``parameter.grad`` become :class:`SharedGradient` meanwhile. It
refuses operations that read values, performs those that work on shares (scaling, clamping), and asks the other ranks
where torch's own tools look at all gradients at once: ``clip_grad_norm_`` and ``GradScaler`` work as usual,
collectively. Autograd and the engine bypass it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from gradsync.base.errors import MisuseError
from gradsync.communicator import Communicator
from gradsync.core.bucket.bucket import Bucket

__all__ = ["WITHOUT_VALUES", "SharedGradient", "SharedGradients", "is_zeroed", "unshare_views"]

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "grad", "grad_fn", "is_leaf", "requires_grad"),
    *("is_cpu", "is_cuda", "is_sparse", "is_mkldnn", "is_nested", "is_quantized"),
)

WITHOUT_VALUES = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
        *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.nelement),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.requires_grad_),
        *(torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.__len__),
    }
)


class SharedGradient(torch.Tensor):
    """A view of a bucket that holds the mean of one share of it. ``part`` is this rank's part of it, if any."""

    # Must become zero: the memory itself may be in other use at the time.
    zeroed: bool
    part: torch.Tensor | None
    # The group of gradients that are shared out with it.
    group: "SharedGradients"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            # No Python code runs inside: a signal handler would find the classes of parameters switched off.
            return torch._C._disabled_torch_function_impl(func, types, tuple(args), kwargs)
        gradients = list(_shared_in(args))
        if func in _ZEROING:
            return _zero(gradients, args[0])
        if any(gradient.group.are_consumed for gradient in gradients):
            raise MisuseError(
                f"{getattr(func, '__name__', func)} was called on a gradient after optimizer.step(), which has used "
                "its memory for new parameters. Look at gradients and clip them before the step"
            )
        if func in _BY_ELEMENT and not any(_shared_in(args[1:])):
            return _on_parts(func, args, kwargs)
        if func is torch.linalg.vector_norm and kwargs.keys() <= {"dtype"} and len(args) <= 2:
            return _norms([args[0]], *args[1:], **kwargs)[0]
        if func is torch._foreach_norm:
            return _norms(*args, **kwargs)
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args, **kwargs)
        raise MisuseError(
            f"{getattr(func, '__name__', func)} was called on a gradient that is shared out: each rank has the mean of "
            "its own share of it only, which is what the sharded optimizer steps on. clip_grad_norm_, clip_grad_value_ "
            "and GradScaler work, on all parameters at once; for anything else use a plain optimizer"
        )


class SharedGradients:
    """The gradients of one synchronizer that are shared out together.

    ``confirm`` raises unless all ranks have them: it is called before the collectives of those that look at them all.
    """

    def __init__(self, communicator: Communicator, confirm: Callable[[], None]) -> None:
        self.communicator, self.confirm = communicator, confirm
        # Their memory holds something else by now.
        self.are_consumed = False
        self._gradients: list[SharedGradient] = []
        self._norms: dict[float, dict[int, torch.Tensor]] = {}

    def take_in(self, bucket: Bucket) -> None:
        """Note that the bucket's gradients are the mean of a share only, from now on."""
        own, payload = bucket.plan.share_of(self.communicator.rank), bucket.flat[: bucket.plan.payload]
        for slot, view in zip(bucket.plan.slots, bucket.views, strict=True):
            view.__class__ = SharedGradient
            shared: Any = view
            shared.zeroed, shared.group = False, self
            if "part" not in shared.__dict__:
                start, stop = max(slot.offset, own.start), min(slot.offset + slot.numel, own.stop)
                shared.part = payload[start:stop] if start < stop else None
            self._gradients.append(shared)

    def forget(self) -> None:
        """Forget cached norms: values have changed."""
        self._norms = {}

    def norm_of(self, gradient: SharedGradient, order: float) -> torch.Tensor:
        """The norm of a gradient over all ranks. Collective for the first of all: torch asks for one after another."""
        if order not in self._norms:
            self.confirm()
            self._norms[order] = self._all_norms(order)
        return self._norms[order][id(gradient)]

    def _all_norms(self, order: float) -> dict[int, torch.Tensor]:
        if order != 2.0 and any(gradient.is_complex() for gradient in self._gradients):
            raise MisuseError(
                "a sharded optimizer keeps complex gradients as pairs of numbers, whose norm is that of the gradients "
                f"for norm_type=2 only, got {order:g}"
            )
        local = torch.stack([_norm(each.part, order).to(self.communicator.device) for each in self._gradients])
        powers = local if math.isinf(order) else local**order
        self.communicator.all_reduce(powers, "max" if math.isinf(order) else "sum").wait()
        wholes = powers if math.isinf(order) else powers ** (1.0 / order)
        return {id(each): whole for each, whole in zip(self._gradients, wholes.unbind(), strict=True)}


_HARMLESS = WITHOUT_VALUES | {
    # Nor do these: a version, and its location.
    *(torch.Tensor._version.__get__, torch.Tensor.detach_, torch.Tensor.data_ptr),  # type: ignore[attr-defined]
}
_ZEROING = {torch.Tensor.zero_, torch._foreach_zero_, torch.zero_}
# In-place operations on each element independently.
_BY_ELEMENT = {
    *(torch.Tensor.mul_, torch.Tensor.div_, torch.Tensor.clamp_, torch.Tensor.clamp_min_, torch.Tensor.clamp_max_),
    *(torch._foreach_mul_, torch._foreach_div_, torch._foreach_clamp_min_, torch._foreach_clamp_max_),
    torch.Tensor.nan_to_num_,
}


def unshare_views(bucket: Bucket) -> None:
    """Make a bucket's views ordinary tensors again."""
    for view in bucket.views:
        view.__class__ = torch.Tensor
        # The group holds them: a reference cycle would keep the bucket's memory alive until garbage collection.
        vars(view).pop("group", None)


def is_zeroed(view: torch.Tensor) -> bool:
    """Whether the view was zeroed while its gradient was shared out."""
    return isinstance(view, SharedGradient) and view.zeroed


def _shared_in(values: Iterable[Any]) -> Iterator[SharedGradient]:
    for value in values:
        if isinstance(value, SharedGradient):
            yield value
        elif isinstance(value, list | tuple):
            yield from _shared_in(value)


def _zero(gradients: Sequence[SharedGradient], result: Any) -> Any:
    for gradient in gradients:
        gradient.group.forget()
        if gradient.group.are_consumed:
            # The memory is in other use: it is zeroed when it comes back. It counts as changed now: on a device the
            # collective that writes new values there does not tell.
            gradient.zeroed = True
            torch.autograd.graph.increment_version(gradient)
        else:
            # Without Python code inside, as above.
            torch._C._disabled_torch_function_impl(torch.Tensor.zero_, (), (gradient,), {})
    return result


def _on_parts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply the function to this rank's parts."""
    first, *others = args
    for gradient in _shared_in([first]):
        gradient.group.forget()
    if isinstance(first, SharedGradient):
        if first.part is not None:
            func(first.part, *others, **kwargs)
        return first
    parts = [each.part if isinstance(each, SharedGradient) else each for each in first]
    # Where there is a number per gradient, those of parts on other ranks are left out with them.
    for place, other in enumerate(others):
        if isinstance(other, list | tuple):
            others[place] = [number for number, part in zip(other, parts, strict=True) if part is not None]
    present = [part for part in parts if part is not None]
    if present:
        func(present, *others, **kwargs)
    return None


def _norms(gradients: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """``torch._foreach_norm``: the norm of each gradient, of which each rank may have a part."""
    norms = []
    for each in gradients:
        norm = each.group.norm_of(each, float(ord)) if isinstance(each, SharedGradient) else _norm(each, float(ord))
        norms.append(norm.to(each.device, dtype or each.dtype.to_real()))
    return norms


def _norm(part: torch.Tensor | None, order: float) -> torch.Tensor:
    if part is None or not part.numel():
        return torch.zeros((), dtype=torch.float64)
    norm: torch.Tensor = torch.linalg.vector_norm(part, order, dtype=torch.promote_types(part.dtype, torch.float32))
    return norm.double()


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """``torch.amp.GradScaler``'s unscaling: a number that is not finite on one rank counts on all. Collective."""
    parts = [each.part if isinstance(each, SharedGradient) else each for each in gradients]
    present = [part for part in parts if part is not None and part.numel()]
    groups = {id(each.group): each.group for each in _shared_in(gradients)}
    for group in groups.values():
        group.confirm()
    if present:
        torch._amp_foreach_non_finite_check_and_unscale_(present, found_inf, inv_scale)
    for group in groups.values():
        group.forget()
        shared = found_inf.to(group.communicator.device, copy=True)
        group.communicator.all_reduce(shared, "max").wait()
        found_inf.copy_(shared)
