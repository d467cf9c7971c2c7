"""What scripts written for Accelerate call besides the loop: each name does what it does there, or says why not."""

import inspect
import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import gradsync
from gradsync import Accelerator, utils
from gradsync.accelerator import AutocastKwargs, ProfileKwargs
from gradsync.accelerator.data_loader import skip_first_batches
from gradsync.errors import ConfigurationError, MisuseError
from tests import accelerate_suite as suite
from tests.ranks import Ranks, ThreadRanks, pool_of

# One worker imports Accelerate for all of them.
pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("packages")]

# -- names ----------------------------------------------------------------------------------------------------------


def test_every_public_name_of_accelerate_is_there_or_says_why_not() -> None:
    theirs = pytest.importorskip("accelerate").Accelerator
    accelerator = Accelerator(cpu=True)
    absent = []
    for name in dir(theirs):
        if name.startswith("_"):
            continue
        if not hasattr(accelerator, name):
            with pytest.raises(AttributeError, match=f"Accelerator.{name} is not supported. "):
                getattr(accelerator, name)
            absent.append(name)
    assert absent == [
        "context_parallel_rank",
        "data_parallel_shard_rank",
        "deepspeed_ulysses_dl_adapter",
        "lomo_backward",
        "maybe_context_parallel",
        "pipeline_parallel_rank",
        "tensor_parallel_rank",
        "verify_device_map",
    ]
    assert not hasattr(accelerator, "lomo_backward")
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'nonsense'"):
        accelerator.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ["deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"])
def test_other_kinds_of_training_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}=.* is not supported by this Accelerator. "):
        Accelerator(**{name: object()})


def test_positional_arguments_are_in_the_order_of_accelerate() -> None:
    theirs = list(inspect.signature(pytest.importorskip("accelerate").Accelerator.__init__).parameters)
    assert list(inspect.signature(Accelerator.__init__).parameters)[: len(theirs)] == theirs


def test_settings_of_accelerate_launch_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
    for text in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", text)
        with pytest.raises(ConfigurationError, match=f"^ACCELERATE_GRADIENT_ACCUMULATION_STEPS must be .*{text}"):
            Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigurationError, match="ACCELERATE_USE_FSDP"):
        Accelerator(cpu=True)


def test_random_numbers_beside_the_order_are_left_alone() -> None:
    assert Accelerator(cpu=True, rng_types=["generator"]).rng_types == ["generator"]
    with pytest.raises(ConfigurationError, match="synchronize_rng_states"):
        Accelerator(cpu=True, rng_types=["torch", "generator"])


# -- over processes -------------------------------------------------------------------------------------------------


def triggers() -> list[bool]:
    accelerator = Accelerator()
    seen = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_flag_of_one_is_seen_by_all_once(thread_ranks: Ranks) -> None:
    assert thread_ranks.run(triggers) == [[False, True, False]] * thread_ranks.world_size


def without_an_accelerator() -> list[Any]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    utils.set_seed(7, device_specific=True)
    drawn = torch.rand(1)
    utils.synchronize_rng_states(["torch"])
    utils.wait_for_everyone()
    return [
        utils.gather(torch.tensor([rank])).tolist(),
        utils.gather_object([{"rank": rank}, (torch.tensor(rank),)]),
        utils.broadcast(torch.tensor([rank])).tolist(),
        utils.broadcast_object_list([rank, "x"]),
        utils.reduce(torch.tensor([float(rank)]), "sum").item(),
        utils.pad_across_processes(torch.ones(rank + 1)).tolist(),
        len(set(utils.gather(drawn).tolist())),
        len(set(utils.gather(torch.rand(1)).tolist())),
    ]


@pytest.mark.program
def test_helpers_need_no_accelerator() -> None:
    for world, results in ((1, [without_an_accelerator()]), (2, pool_of(2).run(without_an_accelerator))):
        for rank, seen in enumerate(results):
            objects = [each for other in range(world) for each in ({"rank": other}, (torch.tensor(other),))]
            padded = [1.0] * (rank + 1) + [0.0] * (world - rank - 1)
            assert seen == [list(range(world)), objects, [0], [0, "x"], float(world - 1), padded, world, 1]


def test_helpers_want_the_process_group_of_a_launched_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="Make the Accelerator first"):
        utils.gather(torch.ones(1))


# -- memory ---------------------------------------------------------------------------------------------------------


def test_a_batch_size_that_fits_is_found_and_kept() -> None:
    tried = []

    @utils.find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, rest: str) -> int:
        tried.append(batch_size)
        if batch_size > 80:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return batch_size

    assert train("x") == 72
    assert tried == [100, 90, 81, 72]
    assert train("x") == 72
    with pytest.raises(TypeError, match=r"Batch size was passed into .*train as the first argument"):
        train(128, "x")


def test_other_errors_are_not_about_memory() -> None:
    def fail(batch_size: int) -> None:
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        utils.find_executable_batch_size(fail)()

    def exhaust(batch_size: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        utils.find_executable_batch_size(exhaust, reduce_batch_size_fn=lambda: 0)()
    assert utils.release_memory(1, 2) == [None, None]


# -- trackers -------------------------------------------------------------------------------------------------------


def track(folder: str) -> tuple[list[Any], bool]:
    accelerate = pytest.importorskip("accelerate")

    class Notes(accelerate.tracking.GeneralTracker):
        name = "notes"
        requires_logging_directory = False

        def __init__(self) -> None:
            self.tracker: list[Any] = []
            super().__init__()

        @accelerate.tracking.on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.tracker.append(values)

        @accelerate.tracking.on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
            self.tracker.append((values, step, options))

        def finish(self) -> None:
            self.tracker.append("end")

    notes = Notes()
    accelerator = Accelerator(log_with=[notes, "tensorboard"], project_dir=folder)
    try:
        accelerator.init_trackers("run", config={"lr": 0.1})
        accelerator.log({"loss": 1.0}, step=3, log_kwargs={"notes": {"tag": "a"}})
        accelerator.get_tracker("notes").log({"more": 2})
        writer = accelerator.get_tracker("tensorboard", unwrap=True)
        accelerator.end_training()
        logger = accelerate.logging.get_logger("tracked")
        logger.info("said by all that are asked", main_process_only=False)
    finally:
        accelerate.state.PartialState._reset_state()
    return notes.tracker, hasattr(writer, "log_dir")


@pytest.mark.program
def test_trackers_of_accelerate_write_on_the_main_process(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logged = [{"lr": 0.1}, ({"loss": 1.0}, 3, {"tag": "a"}), ({"more": 2}, None, {}), "end"]
    main, other = pool_of(2).run(track, str(tmp_path))
    assert main == (logged, True)
    assert other[0] == []
    assert list((tmp_path / "run").rglob("events.*"))


def test_trackers_need_accelerate_and_say_so() -> None:
    with (
        mock.patch.dict(sys.modules, {"accelerate": None}),
        pytest.raises(ConfigurationError, match="pip install accelerate"),
    ):
        Accelerator(cpu=True, log_with="tensorboard")
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("nothing")
    accelerator.log({"loss": 1.0})
    assert accelerator.get_tracker("wandb").log({"loss": 1.0}) is None
    pytest.importorskip("accelerate")
    with pytest.raises(ConfigurationError, match="requires a `logging_dir`"):
        Accelerator(cpu=True, log_with="tensorboard")


def test_loggers_of_accelerate_know_the_process(caplog: pytest.LogCaptureFixture) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.PartialState._reset_state()
    try:
        Accelerator(cpu=True)
        caplog.set_level(logging.INFO)
        accelerate.logging.get_logger("script").info("heard")
        assert "heard" in caplog.text
    finally:
        accelerate.state.PartialState._reset_state()


# -- profiling and precision ----------------------------------------------------------------------------------------


def test_a_profile_is_written_by_every_process(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(["cpu"], output_trace_dir=str(tmp_path))])
    with accelerator.profile() as profiler:
        torch.ones(3) + 1
    assert any("add" in event.key for event in profiler.key_averages())
    assert json.loads((tmp_path / "profile_0.json").read_text())
    with pytest.raises(ConfigurationError, match="activities"), accelerator.profile(ProfileKwargs(["gpu"])):
        pass


def test_autocast_may_be_turned_off_inside() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    ones = torch.ones(2, 2)
    with accelerator.autocast():
        assert (ones @ ones).dtype is torch.bfloat16
        with accelerator.autocast(autocast_handler=AutocastKwargs(enabled=False)):
            assert (ones @ ones).dtype is torch.float32


# -- copies ---------------------------------------------------------------------------------------------------------


def test_an_accelerator_can_be_pickled() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, mixed_precision="bf16")
    accelerator.prepare(DataLoader(range(4), 2), nn.Linear(1, 1))  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.state is accelerator.state
    assert (again.gradient_accumulation_steps, again.mixed_precision, again.prepared.loaders) == (3, "bf16", [])
    with pytest.raises(MisuseError, match="communicator of its own"):
        pickle.dumps(Accelerator(cpu=True, communicator=accelerator.communicator))


def pickled_objects() -> tuple[list[Any], list[Any], list[float]]:
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = DataLoader(range(8), 2, shuffle=True, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    loader, optimizer, scheduler = accelerator.prepare(data, optimizer, scheduler)
    list(loader)
    optimizer.step()
    scheduler.step()
    copy = pickle.loads(pickle.dumps(loader))
    other = pickle.loads(pickle.dumps(scheduler))
    other.optimizers[0].step()
    other.step()
    return [batch.tolist() for batch in loader], [batch.tolist() for batch in copy], other.get_last_lr()


@pytest.mark.program
def test_prepared_objects_can_be_pickled_also_after_an_epoch() -> None:
    """The copy of a loader is distributed among the same ranks and is in the same epoch."""
    for ranks in (ThreadRanks(1), pool_of(2)):
        for original, copy, rates in ranks.run(pickled_objects):
            assert copy == original
            assert rates == [0.5 ** (2 * ranks.world_size)]


# -- first batches --------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def prepare_skipping(stream: bool) -> Any:
    accelerator = Accelerator()
    plain = DataLoader(Stream() if stream else range(12), 1)  # type: ignore[arg-type]
    try:
        loader = accelerator.prepare(skip_first_batches(plain, 3))
    except ConfigurationError as error:
        return str(error)
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader], [int(batch) for batch in loader]


def test_first_batches_of_a_plain_loader_are_skipped_before_it_is_dealt(thread_ranks: Ranks) -> None:
    world = thread_ranks.world_size
    for rank, (first, second) in enumerate(thread_ranks.run(prepare_skipping, False)):
        assert sorted(number for batch in first for number in batch) == list(range(3, 12))
        assert second == list(range(rank, 12, world))
    for message in thread_ranks.run(prepare_skipping, True):
        assert "Prepare the loader first" in message


# -- handlers -------------------------------------------------------------------------------------------------------


def test_settings_that_would_be_lost_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    handler = accelerate.InitProcessGroupKwargs(backend="mpi")
    with pytest.raises(ConfigurationError, match=r"InitProcessGroupKwargs\(backend='mpi'\) means nothing here"):
        Accelerator(cpu=True, kwargs_handlers=[handler])


def gradient_with_hook(hook: str) -> torch.Tensor:
    accelerator = Accelerator(kwargs_handlers=[utils.DistributedDataParallelKwargs(comm_hook=hook)])
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    model = accelerator.prepare(model)
    model(torch.full((1, 3), 1.0 + accelerator.process_index / 512)).sum().backward()
    return next(model.parameters()).grad


@pytest.mark.breadth
def test_communication_hooks_have_names() -> None:
    exact = pool_of(2).run(gradient_with_hook, "no")[0]
    for gradient in pool_of(2).run(gradient_with_hook, "bf16"):
        assert not torch.equal(gradient, exact)
        torch.testing.assert_close(gradient, exact, rtol=1e-2, atol=1e-2)


# -- the page about Accelerate's tests --------------------------------------------------------------------------------


def test_the_page_names_every_expected_failure() -> None:
    text = (Path(__file__).parents[2] / "docs" / "accelerate-tests.md").read_text()
    names = [*suite.SCRIPTS, *suite.NOT_RUN, *(name for failures in suite.EXPECTED.values() for name in failures)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_utils_exports_what_it_names() -> None:
    assert all(hasattr(utils, name) for name in utils.__all__)
    assert gradsync.Accelerator is Accelerator
