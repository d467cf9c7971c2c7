"""A training step with gradsync, no wrapper, and torch's DDP stock and tuned: two Gloo ranks, variants in turns.

    make bench-engine
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/engine.py --model small-layers

``transformer``: 5M parameters. ``small-layers``: 1,000 linear layers of 16×16, where bookkeeping is all that counts.
``unused-layers``: the same, and every tenth layer is left out, others on each rank; torch then needs
``find_unused_parameters=True``. The column to look at there is what each wrapper adds to the step without one.
``much-communication`` and ``much-compute``: a transformer of 25M parameters with few tokens in a batch, and with many.

gradsync takes the fastest transport it finds, which is shared memory here; "gradsync, Gloo" stays with the group's own.

With ``--memory`` it is the peak memory of a step of the transformer, as bytes of live tensors. torch's profiler reports
every allocation of tensor memory; the running sum and its maximum are exact and the same in every run, which the
process's resident size is not. gradsync stays with the process group itself there: over shared memory buckets are no
tensor memory to the profiler, though they have the same size. ``gradsync bench peers`` counts those, too.
"""

import gc
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from interleave import Step, interleave, parser_of, ratio, table
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gradsync
from gradsync.communicator import ProcessGroupCommunicator
from gradsync.tools.bench.peers import TorchDDP, tuned_options

Wrap = Callable[[nn.Module], nn.Module]


class SmallLayers(nn.Module):
    """Many layers with next to nothing in them; ``left_out`` of every ten are skipped."""

    def __init__(self, layers: int = 1000, width: int = 16, *, left_out: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.left_out = left_out

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.left_out is None or number % 10 != self.left_out:
                hidden = layer(hidden)
        return hidden


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 64, 256)


def small_layers() -> tuple[nn.Module, torch.Tensor]:
    return SmallLayers(), torch.randn(8, 16)


def unused_layers() -> tuple[nn.Module, torch.Tensor]:
    return SmallLayers(left_out=dist.get_rank()), torch.randn(8, 16)


def large_transformer(tokens: int) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), torch.randn(1, tokens, 512)


MODELS = {
    "transformer": transformer,
    "small-layers": small_layers,
    "unused-layers": unused_layers,
    "much-communication": lambda: large_transformer(16),
    "much-compute": lambda: large_transformer(128),
}


def variants(model: str) -> dict[str, Wrap]:
    tuned = tuned_options()
    finding = {"find_unused_parameters": True} if model == "unused-layers" else {}
    chosen: dict[str, Wrap] = {
        "no wrapper": lambda module: module,
        "torch stock": partial(TorchDDP, **finding),
        "torch tuned": partial(TorchDDP, **finding, **tuned),
        "torch tuned 5 MB": partial(TorchDDP, bucket_cap_mb=5, **tuned),
        "gradsync": gradsync.DistributedDataParallel,
        "gradsync, Gloo": on_the_group,
    }
    if finding:
        del chosen["torch tuned 5 MB"]
    return chosen


def on_the_group(module: nn.Module, bucket_cap_mb: float | None = None) -> nn.Module:
    return gradsync.DistributedDataParallel(module, communicator=group_communicator(), bucket_cap_mb=bucket_cap_mb)


def group_communicator() -> ProcessGroupCommunicator:
    """A communicator over the process group; gradsync would take shared memory."""
    return ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())


def make_step(module: nn.Module, inputs: torch.Tensor) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        module(inputs).sum().backward()
        optimizer.step()

    return step


def measure(model: str, rounds: int) -> None:
    steps = {}
    for name, wrap in variants(model).items():
        torch.manual_seed(0)
        module, inputs = MODELS[model]()
        steps[name] = make_step(wrap(module), inputs)
    # Past the windows in which order is learned; later ones (16, 32, …) are among those measured.
    record = interleave(steps, warmup=10, rounds=rounds)
    if dist.get_rank() == 0:
        print(f"\n{model}: {dist.get_world_size()} Gloo ranks, {rounds} rounds, torch {torch.__version__}")
        print(table(record, ["torch tuned"]))
        base = record.summary("no wrapper").median
        added = {name: record.summary(name).median - base for name in steps}
        print("added to the step: " + ", ".join(f"{name} {more * 1e3:+.2f} ms" for name, more in added.items()))
        if model == "unused-layers":
            share = added["gradsync"] / added["torch stock"], added["gradsync"] / added["torch tuned"]
            print(f"gradsync adds {share[0]:.2f} of what torch stock adds, {share[1]:.2f} of torch tuned")
        else:
            for ours in ("gradsync", "gradsync, Gloo"):
                tuned = [name for name in steps if "tuned" in name]
                best = max(tuned, key=lambda name: record.ratio(ours, name).median)
                print(f"{ours} / the best tuned torch: {ratio(record, ours, best)}")


MEMORY_VARIANTS: dict[str, Wrap] = {
    "no wrapper": lambda module: module,
    "torch stock": TorchDDP,
    "torch view": partial(TorchDDP, gradient_as_bucket_view=True),
    "gradsync": on_the_group,
    "gradsync 1 MiB": partial(on_the_group, bucket_cap_mb=1),
}


def peak_bytes(wrap: Wrap) -> int:
    """The most that was live at once in two steps, beyond what was live before the wrapper was made."""
    torch.manual_seed(0)
    module, inputs = transformer()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = make_step(wrap(module), inputs)
        for _ in range(4):
            # Gloo's threads let go of a tensor a moment after the collective is done; on busy cores a long moment.
            time.sleep(0.2)
            step()
    live = peak = 0
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del step
    gc.collect()
    return peak


def measure_memory() -> None:
    for name, wrap in MEMORY_VARIANTS.items():
        peak = peak_bytes(wrap)
        if dist.get_rank() == 0:
            print(f"{name:<20}{peak / 2**20:10.2f} MiB")


def main() -> None:
    parser = parser_of(__doc__, rounds=60)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--memory", action="store_true", help="measure memory, not time")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if options.memory:
        measure_memory()
    else:
        for model in MODELS if options.model == "all" else [options.model]:
            measure(model, options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
