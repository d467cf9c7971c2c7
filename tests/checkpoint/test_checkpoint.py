"""Checkpoints: what comes back is what went in, bit by bit; what was damaged is noticed; what was good stays."""

import errno
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync.checkpoint import (
    CheckpointFolder,
    CorruptFileError,
    Loaded,
    decode,
    encode,
    files,
    folder,
    rng_state,
    set_rng_state,
)
from gradsync.communicator import choose_communicator
from gradsync.errors import ConfigurationError, GradsyncError, PeerFailedError
from tests.ranks import Ranks, ThreadRanks
from tests.zygote import run_python

pytestmark = pytest.mark.timeout(120)

FILES = (
    "manifest.json",
    "manifest.sha256",
    "shared.json",
    "shared.safetensors",
    "rank-00000.json",
    "rank-00000.safetensors",
    "rank-00001.json",
    "rank-00001.safetensors",
)
TWO = ThreadRanks(2)


# -- trees ------------------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    raw = tensor.detach().resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8)
    return (type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, raw.flatten().tolist())


def fingerprint(value: Any) -> Any:
    """Equal if and only if type and every bit are."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, np.ndarray | np.generic):
        return (kind, value.dtype, value.shape, value.tobytes())
    if isinstance(value, dict):
        pairs = [(fingerprint(key), fingerprint(child)) for key, child in value.items()]
        return (dict if kind is defaultdict else kind, pairs, fingerprint(getattr(value, "_metadata", None)))
    if isinstance(value, list | tuple):
        return (kind, [fingerprint(child) for child in value])
    if kind is float:
        return (kind, struct.pack("<d", value))
    return (kind, value)


def there_and_back(tree: Any, path: Path) -> Any:
    """Through real files."""
    structure, tensors = encode(tree)
    files.write_file(path / "tree.json", [files.dump_json(structure)])
    files.write_tensors(path / "tree.safetensors", tensors)
    text = files.read_file(path / "tree.json")
    return decode(files.parse_json(path / "tree.json", text), files.read_tensors(path / "tree.safetensors"))


def double(pattern: int) -> float:
    return struct.unpack("<d", pattern.to_bytes(8, "little"))[0]


DTYPES = [
    *files.DTYPE_NAMES,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex64,
    torch.complex128,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, so NaNs with any payload; any shape; half of them seen through a view that is not contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    flat = torch.frombuffer(raw, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


floats = st.integers(0, 2**64 - 1).map(double) | st.floats()
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | floats
    | st.text(st.characters())
    | tensors()
    | st.sampled_from([torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3]), torch.Size([])])
    | st.sampled_from([np.float32(0.1), np.int8(-3), np.bool_(True), np.arange(6.0).reshape(2, 3).T, np.array("é")])
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(), lambda inner: st.tuples(inner, inner), max_leaves=3
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mapping = st.dictionaries(keys, inner, max_size=4)
    return st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple) | mapping | mapping.map(OrderedDict)


@given(tree=st.recursive(leaves, containers, max_leaves=12))
def test_any_tree_comes_back_bit_by_bit(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "trees"
    path.mkdir(exist_ok=True)
    assert fingerprint(there_and_back(tree, path)) == fingerprint(tree)


def test_the_comparison_sees_differences() -> None:
    """A comparison that finds everything equal would pass on anything."""
    nan, other = double(0x7FF8000000000000), double(0x7FF8000000000001)
    different = [1, 1.0, True, nan, other, -0.0, 0.0, (1,), [1], torch.Size([1]), {1: 2}, OrderedDict({1: 2}), None]
    different += [torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(()), nn.Parameter(torch.ones(1))]
    different += [np.float64(1), np.ones(1), np.ones(()), "1", torch.tensor([nan]), torch.tensor([-0.0])]
    prints = [fingerprint(value) for value in different]
    assert all(a != b for number, a in enumerate(prints) for b in prints[:number])


@pytest.mark.parametrize(
    "tree",
    [
        torch.tensor(2.5),
        2**100_000,  # more decimal digits than Python converts
        {"nan": math.nan, "signalling": double(0x7FF0000000000001), "inf": -math.inf, "negative zero": -0.0},
        {1: "int", "1": "text", 1.5: "float", (1, ("a", None)): "tuple", None: 0},
        {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "__metadata__": torch.ones(2)},  # names that collide
        {"\ud800": torch.ones(1), "\udfff\n\0": "\ud800"},  # texts that have no UTF-8 form
        Counter({30: 1, 60: 2}),
        nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(3, requires_grad=True),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch._neg_view(torch.ones(3)),
        torch.zeros(3).expand(4, 3),
        np.array(["2024-01-01"], dtype="datetime64[s]"),
        np.array([1, 2], dtype=">i4"),
        np.longdouble("0.1"),
        np.str_(""),
        np.zeros((0, 3)),
        np.random.RandomState(1).get_state(legacy=False),
        random.Random(1).getstate(),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_what_is_rare_comes_back_too(tree: Any, tmp_path: Path) -> None:
    assert fingerprint(there_and_back(tree, tmp_path)) == fingerprint(tree)


def test_half_precision_complex_numbers_come_back(tmp_path: Path) -> None:
    pairs = torch.tensor([[1.0, 2.0], [math.nan, -0.0]], dtype=torch.float16)
    with pytest.warns(UserWarning, match="ComplexHalf"):
        tensor = torch.zeros(2, dtype=torch.complex32)
    tensor.view(torch.float16).copy_(pairs.flatten())
    assert fingerprint(there_and_back(tensor, tmp_path)) == fingerprint(tensor)


def test_a_defaultdict_comes_back_as_a_dict(tmp_path: Path) -> None:
    back = there_and_back(defaultdict(list, a=[1]), tmp_path)
    assert type(back) is dict
    assert back == {"a": [1]}


def test_a_module_s_state_keeps_its_versions(tmp_path: Path) -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    assert there_and_back(state, tmp_path)._metadata == state._metadata


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    back = there_and_back(Tied().state_dict(), tmp_path)
    first, second = back.values()
    assert (tmp_path / "tree.safetensors").stat().st_size < 2 * first.nbytes
    first[3, 4] = 17.0
    assert second[3, 4] == 17.0


def test_parts_of_one_memory_are_not_taken_for_the_same(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tree = [whole, whole[:3], whole[3:], whole.view(2, 3), whole.view(2, 3).T, whole[:0], whole[:0].view(0, 2)]
    tree += [whole[:4].view(2, 2), whole[:4].view(2, 2).T]
    assert fingerprint(there_and_back(tree, tmp_path)) == fingerprint(tree)


def test_the_files_are_safetensors_files(tmp_path: Path) -> None:
    """For everybody's tools. An odd number of bytes first, so that what follows would lie at an odd place."""
    tensors = {"flags": torch.tensor([True, False, True]), "wide": torch.randn(3, dtype=torch.float64)}
    files.write_tensors(tmp_path / "x.safetensors", tensors)
    data = (tmp_path / "x.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 8 == 0
    assert json.loads(data[8:start])["wide"]["data_offsets"] == [0, 24]
    back = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert {name: bits(tensor) for name, tensor in back.items()} == {n: bits(t) for n, t in tensors.items()}


def test_read_tensors_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    files.write_tensors(path, {"x": torch.ones(1000)})
    tensor = files.read_tensors(path)["x"]
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert tensor.sum() == 1000


class Point(tuple):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1, 2}, "builtins.set"),
        (len, "builtin_function"),
        (Point((1, 2)), "Point"),
        (nn.Linear(1, 1), "Linear"),
        (np.array([None]), "dtype object"),
        (np.zeros(1, dtype=[("x", "f4"), ("y", "f4")]), "dtype"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(1).view(torch.uint8).view(torch.bits8), "bits8"),
        ({frozenset(): 1}, "frozenset"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_held_is_named_by_its_path(value: Any, named: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        encode({"optimizer": {"groups": [0, value]}})
    assert "optimizer.groups.1" in str(raised.value)
    assert named in str(raised.value)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = tree
    with pytest.raises(ConfigurationError, match=r"self\.self.*contain itself"):
        encode(tree)


def test_attributes_that_would_be_lost_are_refused() -> None:
    tree: Any = OrderedDict()
    tree.version = 3
    with pytest.raises(ConfigurationError, match="version"):
        encode({"state": tree})


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigurationError, match=r"pip install gradsync\[checkpoint\]"):
        TWO.run(at, tmp_path)


# -- random numbers ---------------------------------------------------------------------------------------------------


def draw_numbers() -> list[Any]:
    return [random.random(), random.gauss(0, 1), torch.rand(2).tolist(), np.random.rand(2).tolist(), np.random.randn()]


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    before = rng_state()
    try:
        draw_numbers()  # an odd number of Gaussians: the second of a pair is kept in the state
        state = there_and_back(rng_state(), tmp_path)
        first = draw_numbers()
        assert draw_numbers() != first
        set_rng_state(state)
        assert draw_numbers() == first
    finally:
        set_rng_state(before)


def test_what_is_no_random_state_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'torch'"):
        set_rng_state({"python": random.getstate()})


# -- save and load ----------------------------------------------------------------------------------------------------


def at(root: Path, **options: Any) -> CheckpointFolder:
    return CheckpointFolder(root, choose_communicator(), **options)


def own_of(rank: int, step: int) -> dict[str, Any]:
    return {"rank": rank, "position": (step, rank), "gradient": torch.full((rank + 2,), float(step))}


def shared_of(step: int) -> dict[str, Any]:
    model = Tied()
    with torch.no_grad():
        model.embedding.weight.fill_(step)
    return {"model": model.state_dict(), "step": step, "betas": (0.9, math.inf)}


def save(root: Path, *steps: int, **options: Any) -> Path:
    rank, path = choose_communicator().rank, root
    for step in steps:
        # Ranks that are not rank 0 may pass anything for what is shared.
        shared = shared_of(step) if rank == 0 else None
        path = at(root, **options).save(step, shared=shared, own=own_of(rank, step), facts={"lr": step / 10})
    return path


def load(root: Path, step: int | None = None) -> Loaded | None:
    return at(root).load(step)


def outcome(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """What a rank raised. Other ranks' errors must not end this one's."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def assert_is(loaded: Loaded | None, step: int, rank: int, writers: int = 2) -> None:
    """The checkpoint that `save` wrote, in every bit."""
    assert loaded is not None
    assert (loaded.step, loaded.world_size, loaded.facts) == (step, writers, {"lr": step / 10})
    assert fingerprint(loaded.shared) == fingerprint(shared_of(step))
    assert fingerprint(loaded.own) == fingerprint(own_of(rank, step) if rank < writers else None)
    weights = list(loaded.shared["model"].values())
    assert weights[0].data_ptr() == weights[1].data_ptr()


def loads(root: Path, step: int, ranks: Ranks = TWO, writers: int = 2) -> list[Loaded]:
    """What the ranks load, which is the checkpoint of that step."""
    loaded = ranks.run(load, root)
    for rank, each in enumerate(loaded):
        assert_is(each, step, rank, writers)
    return loaded


def all_raise(answers: list[tuple[str, str]], kind: str, *words: str) -> None:
    for raised, message in answers:
        assert raised == kind
        assert all(each in message for each in words), message


def assert_only(root: Path, *steps: int) -> None:
    """These checkpoints and nothing else: no leftovers, hidden ones neither."""
    assert sorted(os.listdir(root)) == [f"step-{step:08d}" for step in steps]


def test_what_was_saved_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    root = tmp_path / "new" / "folder"
    paths = ranks.run(save, root, 90, 100)
    assert paths == [root / "step-00000100"] * ranks.world_size
    assert {(loaded.path, *loaded.notes) for loaded in loads(root, 100, ranks, ranks.world_size)} == {(paths[0],)}
    for rank, loaded in enumerate(ranks.run(load, root, 90)):
        assert_is(loaded, 90, rank, ranks.world_size)
    assert_only(root, 90, 100)
    names = {
        *FILES[:4],
        *(name for rank in range(ranks.world_size) for name in folder.file_names(f"rank-{rank:05d}")),
    }
    assert set(os.listdir(paths[0])) == names


def test_an_empty_folder_has_nothing(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(load, tmp_path / "absent") == [None] * ranks.world_size
    assert not (tmp_path / "absent").exists()
    (tmp_path / "step-1").mkdir()  # not our names
    (tmp_path / "step-00000002").touch()
    assert ranks.run(load, tmp_path) == [None] * ranks.world_size


def steps_in(root: Path) -> list[int]:
    return TWO.run(lambda: at(root).steps())[0]


def test_steps(tmp_path: Path) -> None:
    assert steps_in(tmp_path / "absent") == []
    TWO.run(save, tmp_path, 7, 123456789, 30)
    assert steps_in(tmp_path) == [30, 123456789]


@pytest.mark.parametrize(("keep", "left"), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40])])
def test_the_newest_are_kept(keep: int, left: list[int], tmp_path: Path) -> None:
    TWO.run(lambda: save(tmp_path, 10, 20, 30, 40, keep=keep))
    assert_only(tmp_path, *left)


def test_the_one_just_written_is_kept_though_others_have_higher_steps(tmp_path: Path) -> None:
    TWO.run(lambda: [save(tmp_path, 100, 110), save(tmp_path, 50, keep=1)])
    assert_only(tmp_path, 50)


def test_a_step_is_saved_again(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save, tmp_path, 5)
    damage(tmp_path / "step-00000005" / "shared.safetensors", 10)
    ranks.run(save, tmp_path, 5)
    loads(tmp_path, 5, ranks, ranks.world_size)
    assert_only(tmp_path, 5)


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 1), (3, 2)])
def test_another_number_of_ranks_loads(writers: int, readers: int, tmp_path: Path) -> None:
    ThreadRanks(writers).run(save, tmp_path, 4)
    loads(tmp_path, 4, ThreadRanks(readers), writers)


@pytest.mark.parametrize("victim", range(5))
def test_files_that_no_rank_needs_are_verified_too(victim: int, tmp_path: Path) -> None:
    ThreadRanks(5).run(save, tmp_path, 3, 4)
    damage(tmp_path / "step-00000004" / f"rank-{victim:05d}.json", 0)
    loads(tmp_path, 3, writers=5)


def test_everything_is_on_the_disk_before_it_gets_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        calls.append(("fsync", re.sub(r"\.[0-9a-f]{8}\.partial$", "", name)))
        fsync(descriptor)

    def watched_rename(source: Path, target: Path) -> None:
        calls.append(("rename", target.name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    TWO.run(save, tmp_path, 1)
    place = calls.index(("rename", "step-00000001"))
    before = [name for call, name in calls[:place] if call == "fsync"]
    assert set(FILES) < set(before)
    assert before[-1].startswith(".writing-")
    assert before[-2:-4:-1] == ["manifest.sha256", "manifest.json"]
    assert calls[place + 1] == ("fsync", tmp_path.name)


# -- damage -----------------------------------------------------------------------------------------------------------


def damage(path: Path, place: int, mask: int = 0x20) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(data)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 90 and 100 of two ranks. Tests that damage them make a copy."""
    root = tmp_path_factory.mktemp("pair")
    TWO.run(save, root, 90, 100)
    return root


@pytest.fixture
def root(pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair, tmp_path / "copy"))


def assert_falls_back(root: Path, file: str, reason: str) -> None:
    for loaded in loads(root, 90):
        (note,) = loaded.notes
        assert note.startswith(f"step-00000100 is damaged ({file}: {reason}")
        assert note.endswith("so step-00000090 is used")


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_byte_is_noticed(file: str, root: Path) -> None:
    path = root / "step-00000100" / file
    data = path.read_bytes()
    named = "manifest.json" if file.startswith("manifest") else file
    for place in {0, len(data) // 2, len(data) - 1, *range(0, len(data), 97)}:
        # 0x20 turns letters into their other case and spaces into NULs, which parsers may take for the same.
        for mask in (0x20, 0x01):
            path.write_bytes(data)
            damage(path, place, mask)
            assert_falls_back(root, named, "hash differs")
    path.write_bytes(data)
    loads(root, 100)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["cut", "emptied", "deleted", "longer"])
def test_a_file_of_another_length_is_noticed(file: str, how: str, root: Path) -> None:
    path = root / "step-00000100" / file
    data = path.read_bytes()
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes({"cut": data[:-1], "emptied": b"", "longer": data + b"\n"}[how])
    reason = {"cut": "truncated", "emptied": "truncated", "deleted": "missing", "longer": "too long"}[how]
    guarded = file.startswith("manifest") and how != "deleted"
    assert_falls_back(root, "manifest.json" if guarded else file, "hash differs" if guarded else reason)


def test_an_extra_file_harms_nothing(root: Path) -> None:
    (root / "step-00000100" / "README").write_text("the good one")
    (root / "notes.txt").touch()
    loads(root, 100)


def test_a_renamed_checkpoint_is_not_that_of_another_step(root: Path) -> None:
    shutil.copytree(root / "step-00000100", root / "step-00000200")
    assert all("step 100" in loaded.notes[0] for loaded in loads(root, 100))


def test_a_folder_in_the_place_of_a_file_is_damage(root: Path) -> None:
    path = root / "step-00000100" / "shared.json"
    path.unlink()
    path.mkdir()
    assert_falls_back(root, "shared.json", "cannot be read (Is a directory)")


def test_damage_that_one_rank_alone_sees_counts_for_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save, tmp_path, 90, 100)
    last = ranks.world_size - 1
    damage(tmp_path / "step-00000100" / f"rank-{last:05d}.safetensors", 9)
    loads(tmp_path, 90, ranks, ranks.world_size)


def test_if_none_is_good_each_is_named_with_its_reason(root: Path) -> None:
    damage(root / "step-00000100" / "shared.json", 3)
    (root / "step-00000090" / "rank-00001.safetensors").unlink()
    all_raise(
        TWO.run(outcome, load, root),
        "CorruptFileError",
        "step-00000100 (shared.json: hash differs)",
        "step-00000090 (rank-00001.safetensors: missing)",
    )


def test_a_step_that_was_asked_for_is_not_replaced_by_another(root: Path) -> None:
    damage(root / "step-00000100" / "shared.json", 3)
    all_raise(TWO.run(outcome, load, root, 100), "CorruptFileError", "shared.json: hash differs")
    all_raise(TWO.run(outcome, load, root, 95), "ConfigurationError", "95", "90, 100")


def test_a_newer_format_says_to_update(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "FORMAT", 2)
    TWO.run(save, root, 110)
    monkeypatch.undo()
    all_raise(TWO.run(outcome, load, root), "ConfigurationError", "format 2", "Update gradsync")


def test_a_corrupt_file_is_one_of_gradsync_s_errors(tmp_path: Path) -> None:
    assert issubclass(CorruptFileError, GradsyncError)
    with pytest.raises(CorruptFileError, match=r"x\.json: not JSON"):
        files.parse_json(tmp_path / "x.json", b"{")
    (tmp_path / "x").write_bytes(b"12345678{}")
    with pytest.raises(CorruptFileError, match="not a safetensors file"):
        files.read_tensors(tmp_path / "x")


# -- failure ----------------------------------------------------------------------------------------------------------


def fail_on(rank: int, file: str, number: int) -> Callable[..., files.FileRecord]:
    """A disk on which `file` cannot be written by `rank`."""
    write = files.write_file

    def failing(path: Path, chunks: Any) -> files.FileRecord:
        if path.name == file and choose_communicator().rank == rank:
            list(chunks)
            path.touch()
            raise OSError(number, os.strerror(number), str(path))
        return write(path, chunks)

    return failing


def save_with_failure(root: Path, rank: int, file: str, number: int) -> tuple[str, str]:
    """Step 110, with ranks that are processes or threads."""
    with pytest.MonkeyPatch.context() as patch:
        failing = fail_on(rank, file, number)
        if choose_communicator().rank == rank:  # in threads, one of them for all
            for module in (folder, files):
                patch.setattr(module, "write_file", failing)
        return outcome(save, root, 110)


@pytest.mark.parametrize("file", ["rank-{:05d}.json", "rank-{:05d}.safetensors"])
def test_a_rank_that_fails_fails_all_and_nothing_is_left(ranks: Ranks, file: str, tmp_path: Path) -> None:
    ranks.run(save, tmp_path, 90, 100)
    last = ranks.world_size - 1
    name = file.format(last)
    outcomes = ranks.run(save_with_failure, tmp_path, last, name, errno.ENOSPC)
    assert outcomes[last][0] == "OSError"
    assert "No space left on device" in outcomes[last][1]
    assert name in outcomes[last][1]
    all_raise(outcomes[:last], "PeerFailedError", f"rank {last}: OSError: [Errno 28]", "step 110")
    assert_only(tmp_path, 90, 100)
    loads(tmp_path, 100, ranks, ranks.world_size)


def test_nobody_raises_before_all_is_tidy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that goes on at once, say to another save, would meet what rank 0 is still removing."""
    rmtree = shutil.rmtree

    def slowly(path: Path, **options: Any) -> None:
        time.sleep(0.3)
        rmtree(path, **options)

    def work() -> list[str]:
        assert save_with_failure(root, 1, "rank-00001.json", errno.ENOSPC)[0]
        return sorted(os.listdir(root))

    monkeypatch.setattr(folder.shutil, "rmtree", slowly)
    assert TWO.run(work) == [["step-00000090", "step-00000100"]] * 2


@pytest.mark.parametrize("file", ["shared.json", "shared.safetensors", "manifest.json", "manifest.sha256"])
def test_rank_0_may_fail_at_any_of_its_files(file: str, root: Path) -> None:
    (first, text), (second, peer) = TWO.run(save_with_failure, root, 0, file, errno.EACCES)
    assert (first, second) == ("PermissionError", "PeerFailedError")
    assert file in text
    assert "rank 0: PermissionError" in peer
    assert_only(root, 90, 100)


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_the_last_moment_may_fail_too(call: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one cannot get its name, where a checkpoint of that step exists: that one gets its name back."""

    def failing(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    rename = os.rename

    def no_writing_is_renamed(source: Path, target: Path) -> None:
        failing() if source.name.startswith(".writing-") else rename(source, target)

    replacement = no_writing_is_renamed if call == "rename" else failing
    monkeypatch.setattr(os, call, replacement)
    outcomes = TWO.run(outcome, save, root, 100)
    monkeypatch.undo()
    assert [kind for kind, _ in outcomes] == (["OSError", "PeerFailedError"] if call == "rename" else ["OSError"] * 2)
    assert_only(root, 90, 100)
    loads(root, 100)


def save_a_set(root: Path) -> tuple[str, str]:
    communicator = choose_communicator()
    own = {"state": {1, 2}} if communicator.rank == communicator.world_size - 1 else {}
    return outcome(lambda: at(root).save(1, shared={}, own=own, facts={}))


def test_what_one_rank_cannot_encode_touches_no_disk(ranks: Ranks, tmp_path: Path) -> None:
    *others, last = ranks.run(save_a_set, tmp_path / "new")
    assert last[0] == "ConfigurationError"
    assert "state is builtins.set" in last[1]
    all_raise(others, "PeerFailedError", "state is builtins.set")
    assert not (tmp_path / "new").exists()


def save_or_load_another_step(root: Path, call: str) -> tuple[str, str]:
    rank = choose_communicator().rank
    return outcome(save, root, 5 + rank) if call == "save" else outcome(load, root, 90 + 10 * rank)


@pytest.mark.parametrize("call", ["save", "load"])
def test_ranks_that_mean_different_steps_are_told(call: str, root: Path) -> None:
    answers = TWO.run(save_or_load_another_step, root, call)
    all_raise(answers, "MismatchError", "5, 6" if call == "save" else "90, 100")
    assert_only(root, 90, 100)


@pytest.mark.parametrize(
    ("step", "facts", "named"), [(-1, {}, "-1"), (True, {}, "True"), (1, {"x": {1}}, "set"), (1, [], "list")]
)
def test_arguments_are_checked(step: Any, facts: Any, named: str, tmp_path: Path) -> None:
    answers = ThreadRanks(1).run(outcome, lambda: at(tmp_path).save(step, shared={}, own={}, facts=facts))
    all_raise(answers, "ConfigurationError", named)
    assert os.listdir(tmp_path) == []


def test_keep_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least 1, got 0"):
        ThreadRanks(1).run(at, tmp_path, keep=0)


def save_into_own_folder(root: Path) -> tuple[str, str]:
    return outcome(save, root / str(choose_communicator().rank), 1)


def load_from_own_folder(root: Path) -> tuple[str, str]:
    return outcome(load, root / str(choose_communicator().rank))


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "VISIBLE_WITHIN", 0.1)
    all_raise(ThreadRanks(3).run(save_into_own_folder, tmp_path), "ConfigurationError", "shared disk", "rank 1, 2")
    assert os.listdir(tmp_path) == ["0"]
    assert os.listdir(tmp_path / "0") == []


@pytest.mark.parametrize("others", [0, 1])
def test_a_folder_that_is_not_shared_is_not_loaded_from(others: int, tmp_path: Path) -> None:
    """Rank 0 has a checkpoint and rank 1 none, or each has its own of the same step."""
    TWO.run(save, tmp_path / "0", 1)
    if others:
        ThreadRanks(3).run(save, tmp_path / "1", 1)
    all_raise(TWO.run(load_from_own_folder, tmp_path), "ConfigurationError", "shared disk")


def test_a_folder_that_cannot_be_made_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, *others = ranks.run(outcome, save, tmp_path / "file" / "root", 1)
    assert first[0] == "NotADirectoryError"
    assert str(tmp_path / "file") in first[1]
    assert all(kind == PeerFailedError.__name__ and str(tmp_path / "file") in text for kind, text in others)


def test_what_cannot_be_removed_is_warned_of(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(folder.shutil, "rmtree", failing)
    with pytest.warns(UserWarning, match="step-00000090.*could not be removed.*Permission denied"):
        TWO.run(save, root, 110)
    loads(root, 110)


def test_the_leftovers_of_others_stay(root: Path) -> None:
    for name in (".writing-step-00000001-0123456789abcdef", ".removed-step-00000001-0123456789abcdef"):
        (root / name).mkdir()
        (root / name / "shared.json").touch()
    for name in (".writing-mine", ".git", "step-1"):
        (root / name).mkdir()
    TWO.run(save, root, 110)
    assert set(os.listdir(root)) == {".writing-mine", ".git", "step-1", "step-00000100", "step-00000110"}


def test_what_was_being_replaced_is_still_there(root: Path) -> None:
    """Its writer was killed between two renames. It is loaded, and the next save brings it back."""
    os.rename(root / "step-00000100", root / ".replaced-step-00000100-0123456789abcdef")
    assert steps_in(root) == [90, 100]
    assert all("saved again" in loaded.notes[0] for loaded in loads(root, 100))
    TWO.run(save, root, 80, 110)
    assert_only(root, 100, 110)


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def save_much(root: Path, step: int, size: int) -> tuple[str, str]:
    big = {"weights": torch.zeros(size, dtype=torch.uint8)}
    rank = choose_communicator().rank
    return outcome(lambda: at(root).save(step, shared=big, own=own_of(rank, step), facts={}))


def test_a_full_disk_loses_nothing(ranks: Ranks, small_disk: Path) -> None:
    if ranks.world_size == 4:
        pytest.skip("as with 2")
    ranks.run(save, small_disk, 1)
    first, *others = ranks.run(save_much, small_disk, 2, 1 << 20)
    assert first[0] == "OSError"
    assert first[1].startswith("[Errno 28] No space left on device: ")
    assert "shared.safetensors" in first[1]
    assert "\n" not in first[1]
    for kind, text in others:  # small files may still have found room, or none
        assert (kind == "PeerFailedError" and "rank 0" in text) or (kind == "OSError" and "[Errno 28]" in text)
    assert_only(small_disk, 1)
    loads(small_disk, 1, ranks, ranks.world_size)
    assert ranks.run(save_much, small_disk, 2, 1 << 18) == [("", "")] * ranks.world_size


def test_leftovers_make_room_before_anything_is_written(small_disk: Path) -> None:
    leftover = small_disk / ".writing-step-00000001-0123456789abcdef"
    leftover.mkdir()
    (leftover / "shared.safetensors.0f1e2d3c.partial").write_bytes(bytes(700_000))
    assert TWO.run(save_much, small_disk, 2, 1 << 19) == [("", "")] * 2
    assert_only(small_disk, 2)


# -- kill -9 ----------------------------------------------------------------------------------------------------------

# Children of one process that has imported torch: each is killed before another system call of a save.
KILLED = """
    import os, shutil, signal, sys
    from pathlib import Path
    from gradsync.testing import run_ranks
    from tests.checkpoint.test_checkpoint import save

    template, work = map(Path, sys.argv[1:])

    def die_at(number):
        calls = 0
        def counted(function):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)
            return call
        for name in ("fsync", "rename", "replace", "rmdir", "unlink", "mkdir"):
            setattr(os, name, counted(getattr(os, name)))

    for step in (100, 110):
        status = signal.SIGKILL
        for number in range(1, 1000):
            root = work / str(step) / str(number)
            shutil.copytree(template, root)
            child = os.fork()
            if child == 0:
                die_at(number)
                run_ranks(save, 1, root, step)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            if status != signal.SIGKILL:
                break
        assert status == 0, status
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`100/1`, `100/2`, …: where step 100 was saved again and ended by kill -9, each time later. `110`: a new step."""
    template, work = tmp_path_factory.mktemp("template"), tmp_path_factory.mktemp("killed")
    ThreadRanks(1).run(save, template, 90, 100)
    answer = run_python("-c", textwrap.dedent(KILLED), str(template), str(work))
    assert answer.returncode == 0, answer.stderr
    return work


@pytest.mark.program
@pytest.mark.parametrize(("step", "expected"), [(100, {(90, 100)}), (110, {(90, 100), (90, 100, 110), (100, 110)})])
def test_a_process_that_is_killed_at_any_moment_leaves_good_checkpoints(
    step: int, expected: set[tuple[int, ...]], killed: Path
) -> None:
    one, seen = ThreadRanks(1), set()
    roots = [killed / str(step) / name for name in os.listdir(killed / str(step))]
    assert len(roots) > 12  # or it was not killed in the middle of anything
    assert sum(any(name.startswith(".") for name in os.listdir(root)) for root in roots) > 10
    for root in roots:
        for each in (steps := steps_in(root)):
            assert_is(one.run(load, root, each)[0], each, 0, 1)
        seen.add(tuple(steps))
        one.run(save, root, 120)
        assert len(os.listdir(root)) == 2  # nothing hidden is left
    assert seen == expected
