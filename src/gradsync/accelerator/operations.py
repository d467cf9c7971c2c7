"""Collectives over nested structures of tensors, and the local functions that go with them.

A structure is a tensor, or a dict, list, tuple, named tuple or other mapping of structures; results have the type of
their inputs. Before data moves, the ranks compare what they are about to do: if they differ, every rank raises, and
none waits. Without a ``communicator`` the ranks are those of :func:`everyone`. Tensors travel as bytes, so every dtype
works; results never share memory with arguments or carry a graph, not even in a world of one.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradsync.accelerator.trees import UnsupportedTypeError, flatten, leaves_of, map_leaves, pack, plain, unpack
from gradsync.accelerator.windows import GradientState
from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError, MismatchError, NoProcessGroupError
from gradsync.communicator import Communicator, InProcessWorld, choose_communicator
from gradsync.communicator.agreement import gather_bytes, require_agreement
from gradsync.core.engine.backward_watch import tensors_in

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "everyone",
    "find_batch_size",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "map_tensors",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "slice_tensors",
]

REDUCTIONS = ("mean", "sum", "max", "none")


# -- over ranks -------------------------------------------------------------------------------------------------------


def everyone() -> Communicator:
    """The ranks of the default process group, those of :func:`gradsync.testing.run_ranks`, or this one alone."""
    try:
        return choose_communicator()
    except NoProcessGroupError:
        environment = read_environment()
        if environment.world_size > 1:
            raise ConfigurationError(
                f"rank {environment.rank} of {environment.world_size} has no process group yet. Make the Accelerator "
                "first; if it has a communicator of its own, use its methods of the same name"
            ) from None
        return InProcessWorld(1).communicator(0)


def gather(tensor: Any, *, communicator: Communicator | None = None) -> Any:
    """Tensors of all processes, one after the other along the first dimension; also in nested structures. Collective.

    Tensors without dimensions come back with one, as long as there are processes.
    """
    communicator = everyone() if communicator is None else communicator
    advice = "Tensors must have the same shape and dtype on all ranks; pad_across_processes makes their shapes equal"
    _agree(communicator, "gather", tensor, _shape_and_dtype, advice)
    return map_tensors(lambda each: _gather_one(communicator, each), tensor)


def broadcast(tensor: Any, from_process: int = 0, *, communicator: Communicator | None = None) -> Any:
    """The tensors of process ``from_process``, on all processes. Collective. The arguments are left alone."""
    communicator = everyone() if communicator is None else communicator
    advice = "All ranks must name the same rank and pass tensors of the same shapes and dtypes"
    _agree(communicator, f"broadcast from {from_process!r}", tensor, _shape_and_dtype, advice)
    _require_rank(communicator, from_process)
    return map_tensors(lambda each: _broadcast_one(communicator, each, from_process), tensor)


def reduce(
    tensor: Any, reduction: str = "mean", scale: float = 1.0, *, communicator: Communicator | None = None
) -> Any:
    """The mean, sum or maximum (``"max"``) of tensors over all processes, times ``scale``. Collective.

    ``"none"`` leaves every process its own values. Floats of less than 32 bits are summed in float32. Whole numbers
    stay whole unless they are averaged or scaled; booleans are counted.
    """
    communicator = everyone() if communicator is None else communicator
    call = f"reduce by {reduction!r} with scale {scale!r}"
    advice = "All ranks must pass the same reduction and scale, and tensors of the same shapes and dtypes"
    tensors = _agree(communicator, call, tensor, _shape_and_dtype, advice)
    if reduction not in REDUCTIONS:
        raise ConfigurationError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if reduction == "max" and any(each.is_complex() for each in tensors):
        raise ConfigurationError("reduction 'max' needs numbers with an order, got a complex tensor")
    return map_tensors(lambda each: _reduce_one(communicator, each, reduction, scale), tensor)


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    communicator: Communicator | None = None,
) -> Any:
    """Tensors filled up with ``pad_index`` to the largest size that any process has in ``dim``. Collective.

    Tensors that have no dimension ``dim`` and those that are large enough come back as they are.
    """
    communicator = everyone() if communicator is None else communicator
    advice = "Tensors must have as many dimensions on all ranks; reshape them before they are padded"
    call = f"pad_across_processes in dim {dim!r}"
    tensors = _agree(communicator, call, tensor, lambda each: f"{each.ndim}-dimensional", advice)
    sizes = [each.shape[dim] for each in tensors if -each.ndim <= dim < each.ndim]
    if not sizes:
        return tensor
    largest = torch.tensor(sizes, device=communicator.device)
    communicator.all_reduce(largest, "max").wait()
    wanted = iter(largest.tolist())

    def pad(each: torch.Tensor) -> torch.Tensor:
        if not -each.ndim <= dim < each.ndim:
            return each
        missing = next(wanted) - each.shape[dim]
        if missing == 0:
            return each
        shape = list(each.shape)
        shape[dim] = missing
        filler = each.new_full(shape, pad_index)
        return torch.cat([filler, each] if pad_first else [each, filler], dim)

    return map_tensors(pad, tensor)


def gather_object(object: Sequence[Any], *, communicator: Communicator | None = None) -> list[Any]:
    """The lists of all processes as one: of numbers, texts, tensors, and dicts, lists and tuples of such. Collective.

    Tensors arrive on the CPU.
    """
    communicator = everyone() if communicator is None else communicator
    own = _packed(object, "gather_object")
    answers = [unpack(payload) for payload in gather_bytes(communicator, own)]
    _refuse_errors(answers, "gather_object")
    return [element for answer in answers for element in answer["objects"]]


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, communicator: Communicator | None = None
) -> list[Any]:
    """Put the elements of process ``from_process`` into the list of every process; returns the list too. Collective."""
    communicator = everyone() if communicator is None else communicator
    call = f"broadcast_object_list from {from_process!r}"
    advice = "All ranks must name the same rank and pass lists of the same length"
    require_agreement(communicator, call, [("call", call), ("length", len(object_list))], remedy=advice)
    _require_rank(communicator, from_process)
    own = _packed(object_list, "broadcast_object_list") if communicator.rank == from_process else b""
    payloads = gather_bytes(communicator, own)
    answer = unpack(payloads[from_process])
    _refuse_errors([answer], "broadcast_object_list", from_process)
    object_list[:] = answer["objects"]
    return object_list


def _packed(objects: Any, call: str) -> bytes:
    try:
        if not isinstance(objects, list | tuple):
            raise UnsupportedTypeError(f"a list was expected, got {type(objects).__name__}")
        return pack({"objects": list(objects)}, "message")
    except (TypeError, ValueError, RecursionError) as error:
        # The other ranks wait for an answer, and raise too.
        return pack({"error": f"{error}".replace("message['objects']", "objects")})


def _refuse_errors(answers: list[Any], call: str, first: int = 0) -> None:
    for rank, answer in enumerate(answers, first):
        if "error" in answer:
            raise UnsupportedTypeError(
                f"{call} sends lists of dense tensors, numbers, texts, None, and dicts, lists and tuples of these, but "
                f"on rank {rank}: {answer['error']}. Nothing is pickled: turn other values into such first"
            )


def _require_rank(communicator: Communicator, rank: int) -> None:
    if not 0 <= rank < communicator.world_size:
        raise ConfigurationError(f"from_process must be in 0..{communicator.world_size - 1}, got {rank!r}")


def gather_for_metrics(communicator: Communicator, data: Any, state: GradientState, *, objects: bool = False) -> Any:
    """Gather ``data`` and drop what the active loader has only repeated.

    Tensors may differ in length between processes, where the last batches of a loader do. ``objects``: a list of values
    of which each counts as a sample, tensors or not; so is everything that is no structure of tensors alone.
    """
    repeated = state.in_dataloader and state.active_dataloader.is_padding
    if objects or not all(isinstance(leaf, torch.Tensor) for _, leaf in leaves_of(data)):
        gathered = gather_object([] if repeated else data, communicator=communicator)
        return gathered[: state.remainder] if _completed(state) else gathered
    if state.in_dataloader and state.active_dataloader.uneven:
        return map_tensors(lambda tensor: _of_any_length(communicator, tensor, repeated), data)
    gathered = gather(data, communicator=communicator)
    if not _completed(state):
        return gathered
    remainder = state.remainder
    return map_tensors(lambda tensor: tensor[:remainder] if tensor.dim() else tensor, gathered)


def _completed(state: GradientState) -> bool:
    return state.end_of_dataloader and state.remainder > 0


def _of_any_length(communicator: Communicator, tensor: torch.Tensor, repeated: bool) -> torch.Tensor:
    """The tensors of all ranks, one after the other along the first dimension, however long each is."""
    if tensor.dim() == 0:
        tensor = tensor.unsqueeze(0)
    kept = tensor[:0] if repeated else tensor
    own = torch.tensor([len(kept)], device=communicator.device)
    lengths = gather(own, communicator=communicator).tolist()
    longest = max(lengths)
    padded = pad_across_processes(kept, communicator=communicator)
    gathered: torch.Tensor = gather(padded, communicator=communicator)
    parts = [gathered[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]
    return torch.cat(parts)


# -- on this rank -----------------------------------------------------------------------------------------------------


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """``tree`` with ``function(tensor)`` in the place of every tensor. Other leaves stay."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def send_to_device(tree: Any, device: torch.device | str | int, non_blocking: bool = False) -> Any:
    """``tree`` with everything that has a ``to`` method moved to ``device``. Other leaves stay."""

    def moves_itself(node: Any) -> bool:
        return callable(getattr(node, "to", None))

    def move(leaf: Any) -> Any:
        if not moves_itself(leaf):
            return leaf
        try:
            return leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # a user's class, whose to() takes the device alone
            if isinstance(leaf, torch.Tensor):
                raise
            return leaf.to(device)

    # Some containers, such as packed sequences, are tuples that know how to move themselves.
    return map_leaves(move, tree, stop=moves_itself)


def find_batch_size(tree: Any) -> int | None:
    """The size in dimension 0 of the first tensor that has one, or None."""
    return next((tensor.shape[0] for tensor in tensors_in(tree) if tensor.ndim > 0), None)


def slice_tensors(tree: Any, tensor_slice: slice) -> Any:
    """Every tensor's part ``tensor[tensor_slice]``, as a view."""
    return map_tensors(lambda tensor: tensor[tensor_slice], tree)


def concatenate(trees: Sequence[Any], dim: int = 0) -> Any:
    """Structures of the same make, tensor by tensor one after the other along ``dim``."""
    if not trees:
        raise ConfigurationError("concatenate needs at least one structure, got none")
    leaves, make = flatten(trees[0])
    rows = [leaves]
    for number, other in enumerate(trees[1:], 1):
        try:
            rows.append(make.flatten_up_to(plain(other)))
        except ValueError as error:
            raise ConfigurationError(
                f"concatenate needs structures of the same make, but number 0 is {_outline(trees[0])} and number "
                f"{number} is {_outline(other)}: {error}"
            ) from error
    joined = iter([_concatenate_leaves(parts, dim) for parts in zip(*rows, strict=True)])
    return map_leaves(lambda _: next(joined), trees[0])


def _concatenate_leaves(parts: Sequence[Any], dim: int) -> Any:
    if all(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat(list(parts), dim)
    if len(parts) == 1:
        return parts[0]
    kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
    raise UnsupportedTypeError(f"concatenate joins tensors, got {kinds}. Take other values out of the structures first")


def _outline(tree: Any) -> str:
    if not isinstance(tree, Mapping | list | tuple):
        return type(tree).__name__
    return f"{type(tree).__name__} with {list(tree if isinstance(tree, Mapping) else range(len(tree)))}"


# -- one tensor -------------------------------------------------------------------------------------------------------


def _gather_one(communicator: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor if tensor.ndim else tensor.unsqueeze(0)
    shape = (rows.shape[0] * communicator.world_size, *rows.shape[1:])
    if not rows.numel():
        return tensor.new_empty(shape)
    payload = _payload(communicator, rows)
    gathered = payload.new_empty(payload.numel() * communicator.world_size)
    communicator.all_gather(gathered, payload).wait()
    return gathered.view(tensor.dtype).view(shape).to(tensor.device)


def _broadcast_one(communicator: Communicator, tensor: torch.Tensor, source: int) -> torch.Tensor:
    payload = _payload(communicator, tensor).clone()
    if payload.numel():
        communicator.broadcast(payload, source).wait()
    return payload.view(tensor.dtype).view(tensor.shape).to(tensor.device)


def _reduce_one(communicator: Communicator, tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
    total = torch.empty(tensor.shape, dtype=_summed_in(tensor), device=_transfer_device(communicator, tensor))
    total.copy_(tensor.detach())
    if reduction != "none" and total.numel():
        # NCCL knows no complex numbers.
        flat = torch.view_as_real(total) if total.is_complex() else total
        communicator.all_reduce(flat, "max" if reduction == "max" else "sum").wait()
    result = total / communicator.world_size if reduction == "mean" else total
    if scale != 1:
        result = result * scale
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    counted = tensor.dtype == torch.bool and reduction == "sum"
    dtype = result.dtype if counted or (whole and result.is_floating_point()) else tensor.dtype
    return result.to(device=tensor.device, dtype=dtype)


def _summed_in(tensor: torch.Tensor) -> torch.dtype:
    """The dtype to sum in: wide enough not to lose anything on the way, and known to every backend."""
    if not (tensor.is_complex() or tensor.is_floating_point()):
        return torch.int64
    least = torch.complex64 if tensor.is_complex() else torch.float32
    return tensor.dtype if tensor.dtype.itemsize > least.itemsize else least


def _payload(communicator: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, where the communicator can read them. May be the tensor's own memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).to(_transfer_device(communicator, tensor))


def _transfer_device(communicator: Communicator, tensor: torch.Tensor) -> torch.device:
    # The device of a group with a CPU backend is the CPU; one with NCCL alone cannot take CPU tensors.
    return communicator.device if tensor.device.type == "cpu" else tensor.device


# -- what ranks compare -----------------------------------------------------------------------------------------------


def _shape_and_dtype(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _agree(
    communicator: Communicator, call: str, tree: Any, describe: Callable[[torch.Tensor], str], advice: str
) -> list[torch.Tensor]:
    """The tensors of a call. Raises on every rank unless all make the same call, with alike tensors and no others."""
    leaves = leaves_of(tree)
    described = [(path, describe(leaf) if _is_dense(leaf) else _kind(leaf)) for path, leaf in leaves]
    mismatch: MismatchError | None = None
    try:
        require_agreement(communicator, call, [("call", call), *described], remedy=advice)
    except MismatchError as error:
        mismatch = error
    for path, leaf in leaves:
        if not _is_dense(leaf):
            raise UnsupportedTypeError(
                f"{call} takes dense tensors and dicts, lists and tuples of them, but on rank {communicator.rank} "
                f"{path} is {_kind(leaf)}: {reprlib.repr(leaf)}. Make a number a torch.tensor, a sparse tensor dense; "
                "gather_object takes other values"
            )
    if mismatch is not None:
        raise mismatch
    return [tensor for _, tensor in leaves]


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_nested and leaf.layout == torch.strided


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    return "a nested tensor" if leaf.is_nested else f"a {leaf.layout} tensor"
