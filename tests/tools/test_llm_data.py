"""The data of `gradsync train`: text from files, one token file, and windows that only their number decides."""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import ConfigurationError
from gradsync.tools.llm import text_sources, tokens
from gradsync.tools.llm.text_sources import FileSource, HuggingFaceSource, open_source
from gradsync.tools.llm.tokens import (
    Batches,
    BatchPlan,
    MicroBatch,
    TokenFile,
    default_cache_folder,
    prepare_tokens,
    validation_batches,
)

# -- where text comes from --------------------------------------------------------------------------------------------


def write(folder: Path, **contents: str) -> None:
    for name, text in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_standard_library_is_sorted_limited_and_without_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source("stdlib")
    assert isinstance(source, FileSource)
    folder = Path(os.__file__).parent
    names = [path.relative_to(folder).as_posix() for path in source.files]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not {"test", "tests", "site-packages", "idlelib"} & {part for name in names for part in name.split("/")}
    size = sum(path.stat().st_size for path in source.files)
    assert 4e6 < size <= 16e6
    assert f"{len(names)} files, {size / 1e6:.1f} MB" in source.description
    monkeypatch.setattr(text_sources, "STDLIB_BYTES", 200_000)
    limited = open_source("stdlib")
    assert isinstance(limited, FileSource)
    assert limited.files == source.files[: len(limited.files)]
    assert 0 < sum(path.stat().st_size for path in limited.files) <= 200_000


def test_a_folder_is_its_text_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path, b_txt="b", a_md="a", sub__c_py="c", d_bin="no", z_txt="z")
    write(tmp_path, **{"_hidden__x_txt": "no", "_y_txt": "no"})
    (tmp_path / "e.jsonl").write_text('{"text": "e1"}\n\n{"id": 3, "text": "e2 \\u00e9"}\n')
    assert list(open_source(str(tmp_path))) == [b"a", b"b", b"e1", "e2 é".encode(), b"c", b"z"]


def test_a_large_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "BLOCK_BYTES", 3)
    (tmp_path / "a.txt").write_bytes(b"12345\n67\n8901234\nend")
    assert list(open_source(str(tmp_path / "a.txt"))) == [b"12345\n", b"67\n8901234\n", b"end"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is no JSON"),
        ('{"body": "x", "id": 1}', 'line 2 of .* has the fields body, id; expected .*"text"'),
        ('{"text": 3}', "has the fields text"),
        ('["text"]', "has a list"),
    ],
)
def test_a_line_without_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=message):
        list(open_source(str(tmp_path / "a.jsonl")))


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no text source 'nowhere'\. Expected 'stdlib'"):
        open_source("nowhere")
    write(tmp_path, a_bin="x")
    with pytest.raises(ConfigurationError, match=r"has no text: expected files ending in \.txt"):
        open_source(str(tmp_path))
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=r"cannot read .*gone\.txt"):
        prepare_tokens(str(tmp_path), cache_folder=tmp_path / "cache")


def test_an_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the system's answer is put in."""

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigurationError, match=r"cannot read the folder .*: Permission denied"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:a/b", ("a/b", None, "train", "text")),
        ("hf:a/b:test", ("a/b", None, "test", "text")),
        ("hf:a/b@raw-v1:train[:1%]:body", ("a/b", "raw-v1", "train[:1%]", "body")),
    ],
)
def test_names_of_datasets(spec: str, expected: tuple[str, ...]) -> None:
    source = HuggingFaceSource.parse(spec)
    assert (source.name, source.config, source.split, source.column) == expected


@pytest.mark.parametrize("spec", ["hf:", "hf::train", "hf:a:b:c:d", "hf:a::text"])
def test_names_that_are_none(spec: str) -> None:
    with pytest.raises(ConfigurationError, match="expected hf:NAME"):
        open_source(spec)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")


@pytest.mark.xdist_group("packages")
@pytest.mark.program
@pytest.mark.usefixtures("datasets_cache")
def test_datasets_from_local_data(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", "two é"], "id": [1, 2]})
    rows.save_to_disk(str(tmp_path / "rows"))
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "lines.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    expected = {
        f"hf:{tmp_path}/rows": [b"one", "two é".encode()],
        f"hf:{tmp_path}/splits:test": ["two é".encode()],
        f"hf:{tmp_path}/lines.jsonl:train:body": [b"x", b"y"],
    }
    assert {spec: list(open_source(spec)) for spec in expected} == expected
    for spec, message in {
        f"hf:{tmp_path}/splits:dev": "has the splits train, test and no 'dev'",
        f"hf:{tmp_path}/rows:train:body": "has the columns text, id and no 'body'",
        f"hf:{tmp_path}/rows:train:id": "column id .* holds a int, expected text",
        f"hf:{tmp_path}/lines.jsonl:dev": "cannot load split 'dev'",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            list(open_source(spec))


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    write(tmp_path, a_txt="a")
    with pytest.raises(ConfigurationError, match=r"datasets.*pip install 'gradsync\[hf\]'"):
        list(open_source(f"hf:{tmp_path}"))
    with pytest.raises(ConfigurationError, match=r"transformers.*pip install 'gradsync\[hf\]'"):
        prepare_tokens(str(tmp_path), tokenizer="any", cache_folder=tmp_path / "cache")


# -- token files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents: 7 bytes with the one between them."""
    write(tmp_path / "text", a_txt="äb", b_txt="cde")
    return tmp_path


def prepare(folder: Path, tokenizer: str | None = None) -> TokenFile:
    return prepare_tokens(str(folder / "text"), tokenizer=tokenizer, cache_folder=folder / "cache")


def test_bytes_are_tokens_and_documents_are_separated(folder: Path) -> None:
    prepared = prepare(folder)
    assert bytes(prepared.tokens.tolist()) == "äb\0cde".encode()
    assert (prepared.length, prepared.vocab_size, prepared.tokens.dtype) == (7, 256, torch.uint8)
    assert "2 files" in prepared.description
    assert "7 tokens" in prepared.description


def test_a_second_call_builds_nothing_and_a_changed_source_is_built_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(folder)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_build", None)
        assert prepare(folder).path == first.path
    file = folder / "text" / "b.txt"
    file.write_text("xyz")
    # The same size, and on a coarse clock perhaps the same time: a second later for certain.
    os.utime(file, (1, file.stat().st_mtime + 1))
    second = prepare(folder)
    assert second.path != first.path
    assert bytes(second.tokens[4:].tolist()) == b"xyz"
    write(folder / "text", c_txt="more")
    assert prepare(folder).length == 7 + 5


@pytest.mark.parametrize("size", [0, 3, 7, 60])
def test_a_file_cut_short_is_not_used(folder: Path, size: int) -> None:
    whole = prepare(folder)
    content = whole.path.read_bytes()
    assert len(content) > 60
    for broken in (content[:size], content[size + 1 :], b"\0" * len(content), content[:-1] + b"0"):
        whole.path.write_bytes(broken)
        assert TokenFile.open(whole.path) is None
        assert prepare(folder).path.read_bytes() == content


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    (folder / "text" / "c.jsonl").write_text("no json\n")
    with pytest.raises(ConfigurationError, match="is no JSON"):
        prepare(folder)
    assert list((folder / "cache").iterdir()) == []


def test_many_may_build_at_the_same_time(folder: Path) -> None:
    gate, results = threading.Barrier(6), []

    def build() -> None:
        gate.wait()
        results.append(bytes(prepare(folder).tokens.tolist()))

    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["äb\0cde".encode()] * 6
    assert [path.suffix for path in (folder / "cache").iterdir()] == [".tokens"]


def test_text_that_is_empty_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "text", a_txt="", b_txt="")
    with pytest.raises(ConfigurationError, match=r"there is no text in .*2 files"):
        prepare(tmp_path)


def test_a_cache_that_cannot_be_written_is_refused(folder: Path) -> None:
    (folder / "cache").write_text("a file")
    with pytest.raises(ConfigurationError, match=r"cannot write .* Choose another folder with cache_folder"):
        prepare(folder)


def test_the_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "gradsync"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_folder() == Path.home() / ".cache" / "gradsync"


def test_split_takes_the_tail(tmp_path: Path) -> None:
    write(tmp_path / "text", a_txt="".join(chr(97 + number % 26) for number in range(1000)))
    prepared = prepare(tmp_path)
    for at_least, size in ((0, 10), (65, 65), (900, 500)):
        train, validation = prepared.split(at_least=at_least)
        assert len(validation) == size
        assert torch.equal(torch.cat([train, validation]), prepared.tokens)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Words are tokens, numbered from 70000 so that two bytes are too few for the last of them."""
    pytest.importorskip("transformers")
    vocabulary = {"<end>": 0, "a": 1, "b": 2, **{f"w{number}": number for number in range(3, 70_001)}}
    path = tmp_path / "tokenizer"
    path.mkdir()
    fast = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<end>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(fast))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (path / "tokenizer_config.json").write_text(json.dumps(facts))
    return str(path)


@pytest.mark.xdist_group("packages")
def test_a_tokenizer_of_transformers(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "PIECE_BYTES", 4)
    write(tmp_path / "text", a_txt="a b\na w70000\nb", b_txt="b b")
    prepared = prepare(tmp_path, tokenizer)
    assert (prepared.vocab_size, prepared.tokens.dtype) == (70_001, torch.uint32)
    assert prepared.tokens.to(torch.int64).tolist() == [1, 2, 1, 70_000, 2, 0, 2, 2]
    assert prepared.path != prepare(tmp_path).path
    rows = Batches(prepared.tokens, BatchPlan(sequence_length=3, global_batch=2, micro_batch=2), 0, 1).window(0)
    assert sorted(rows[0][0].tolist()) == [[1, 2, 1], [2, 0, 2]]


@pytest.mark.xdist_group("packages")
def test_a_tokenizer_that_is_none_is_refused(folder: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigurationError, match=r"^--tokenizer .* cannot be loaded"):
        prepare(folder, tokenizer=str(folder / "text"))


# -- windows ----------------------------------------------------------------------------------------------------------

LENGTH = 3
WIDTH = LENGTH + 1


def plan(global_batch: int, micro_batch: int = 2, seed: int = 0) -> BatchPlan:
    return BatchPlan(sequence_length=LENGTH, global_batch=global_batch, micro_batch=micro_batch, seed=seed)


def samples_in(micro_batches: list[MicroBatch]) -> list[int]:
    """The numbers of the samples, where the tokens are 0, 1, 2, …"""
    numbers = []
    for inputs, targets in micro_batches:
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == LENGTH
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs[:, 0] % WIDTH, torch.zeros(len(inputs), dtype=torch.int64))
        numbers += (inputs[:, 0] // WIDTH).tolist()
    return numbers


@given(
    samples=st.integers(1, 40),
    data=st.data(),
    world_size=st.integers(1, 9),
    micro_batch=st.integers(1, 5),
    seed=st.integers(-3, 2**70),
)
def test_a_window_is_the_same_samples_for_every_world(
    samples: int, data: st.DataObject, world_size: int, micro_batch: int, seed: int
) -> None:
    global_batch = data.draw(st.integers(1, samples))
    number = data.draw(st.integers(0, 30))
    shape = plan(global_batch, micro_batch, seed)
    text = torch.arange(samples * WIDTH + data.draw(st.integers(0, LENGTH)))
    alone = samples_in(Batches(text, shape, 0, 1).window(number))
    shares = [Batches(text, shape, rank, world_size).window(number) for rank in range(world_size)]
    # Contiguous shares: in the order of ranks they are the window in its own order.
    assert [each for share in shares for each in samples_in(share)] == alone
    assert len(alone) == global_batch
    counts = [len(samples_in(share)) for share in shares]
    assert max(counts) - min(counts) <= 1
    for share in shares:
        sizes = [len(inputs) for inputs, _ in share]
        assert all(size == micro_batch for size in sizes[:-1])
        assert all(0 < size <= micro_batch for size in sizes)


@given(samples=st.integers(1, 30), data=st.data(), seed=st.integers(0, 5))
def test_every_epoch_is_every_sample_once(samples: int, data: st.DataObject, seed: int) -> None:
    global_batch = data.draw(st.integers(1, samples))
    batches = Batches(torch.arange(samples * WIDTH), plan(global_batch, seed=seed), 0, 1)
    windows = -(-3 * samples // global_batch)
    stream = [each for number in range(windows) for each in samples_in(batches.window(number))]
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(numbers=st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_a_window_does_not_depend_on_what_was_asked_before(numbers: list[int]) -> None:
    text, shape = torch.arange(10 * WIDTH), plan(4)
    used = Batches(text, shape, 1, 2)
    for number in numbers:
        assert samples_in(used.window(number)) == samples_in(Batches(text, shape, 1, 2).window(number))


def test_epochs_and_seeds_are_permuted_differently() -> None:
    text = torch.arange(50 * WIDTH)

    def epoch(seed: int, number: int) -> tuple[int, ...]:
        return tuple(samples_in(Batches(text, plan(50, seed=seed), 0, 1).window(number)))

    orders = {epoch(seed, number) for seed in range(4) for number in range(4)}
    assert len(orders) == 16
    assert tuple(range(50)) not in orders
    # Global random state has no part in it.
    torch.manual_seed(1)
    assert epoch(0, 0) in orders


def test_one_permutation_is_kept_and_two_where_epochs_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    randperm = torch.randperm

    def counting(count: int, **settings: Any) -> torch.Tensor:
        drawn.append(count)
        return randperm(count, **settings)

    monkeypatch.setattr(torch, "randperm", counting)
    batches = Batches(torch.arange(10 * WIDTH), plan(4), 0, 1)
    for number, expected in enumerate([1, 1, 2, 2, 2, 3]):
        batches.window(number)
        assert len(drawn) == expected
    assert len(batches._permutations) == 1


def test_epochs_are_counted() -> None:
    batches = Batches(torch.arange(10 * WIDTH + 2), plan(4), 0, 1)
    assert (batches.samples, batches.windows_per_epoch) == (10, 2.5)


@given(
    samples=st.integers(1, 40),
    limit=st.integers(1, 12),
    world_size=st.integers(1, 5),
    micro_batch=st.integers(1, 4),
)
def test_validation_is_the_same_for_every_world(samples: int, limit: int, world_size: int, micro_batch: int) -> None:
    text, shape = torch.arange(samples * WIDTH), plan(1, micro_batch)
    alone = samples_in(validation_batches(text, shape, limit, 0, 1))
    assert len(alone) == min(limit * micro_batch, samples)
    assert alone == sorted(set(alone))
    shared = [samples_in(validation_batches(text, shape, limit, rank, world_size)) for rank in range(world_size)]
    assert [each for share in shared for each in share] == alone


def test_validation_is_spread_over_the_text_and_may_be_nothing() -> None:
    assert samples_in(validation_batches(torch.arange(12 * WIDTH), plan(1, 1), 4, 0, 1)) == [0, 3, 6, 9]
    assert validation_batches(torch.arange(LENGTH), plan(1), 4, 0, 1) == []


def test_data_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"a sample takes 4 tokens .* only 3\."):
        Batches(torch.arange(3), plan(1), 0, 1)
    with pytest.raises(ConfigurationError, match="takes 5 sequences, but 17 tokens are only 4 samples of 4"):
        Batches(torch.arange(17), plan(5), 0, 1)
