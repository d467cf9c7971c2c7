"""What the DDP paper says of up to 256 GPUs, and what the simulator says.

    python benchmarks/plan_ddp_paper.py

Li et al., PyTorch Distributed, VLDB 2020, state in words how much overlap gains on 32 GPUs and how much longer an
iteration on 256 is than a local one, for ResNet50 and BERT over NCCL and Gloo: eight numbers. The points of their
curves are in a figure only, and are not used. What they do not state is chosen here: for each backend one bandwidth of
a host and one latency of a step of the ring, for both models alike, and how long an iteration of BERT takes by itself
(as sequences of 128 tokens). Five numbers are fitted to eight, so it shows little more than that the simulator can have
the paper's shape. That DDP broadcasts the buffers of ResNet50 before every forward, and begins with a small bucket, is
left out: with both the worst error is 19 % instead of 18.
"""

import sys
from dataclasses import dataclass, replace

from gradsync.observe.plan.calibration import Calibration
from gradsync.observe.plan.library import published
from gradsync.plan import Link, Schedule, Transport, simulate

MACHINE, BUCKET_BYTES = "v100-100g", 25 << 20
MODELS = {"ResNet50": ("resnet50", 32), "BERT": ("bert-large", 25)}
# Backend and model: the share of an iteration that overlap saves on 32 GPUs; an iteration on 256, in local ones.
STATED = {
    ("NCCL", "ResNet50"): (0.380, 2.0),
    ("NCCL", "BERT"): (0.352, 2.0),
    ("Gloo", "ResNet50"): (0.268, 3.0),
    ("Gloo", "BERT"): (0.215, 6.0),
}
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Where the search for bandwidth (bytes a second) and latency (seconds) begins, and how it closes in: factors.
BEGIN, FACTORS = (2.5e9, 50e-6), (1.6, 1.25, 1.1, 1.04, 1.015)
WANTED = 0.15


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What is chosen of a backend."""

    bandwidth: float
    latency: float

    def transport(self, calibration: Calibration, ranks: int) -> Transport:
        topology = calibration.transport.topology
        between = Link(latency=self.latency, bandwidth=self.bandwidth)
        inside = Link(latency=self.latency, bandwidth=max(self.bandwidth, 1e11))
        return Transport(topology=replace(topology, ranks=ranks, between=between, inside=inside))


def iteration(model: str, fabric: Fabric, ranks: int, *, overlap: bool = True) -> float:
    name, batch = MODELS[model]
    calibration = published(MACHINE, name, batch=batch)
    profile = calibration.profile.in_buckets(BUCKET_BYTES)
    schedule = Schedule(overlap="backward" if overlap else "none")
    return simulate(profile, fabric.transport(calibration, ranks), schedule).step


def said(model: str, fabric: Fabric) -> tuple[float, float]:
    """The two numbers of :data:`STATED`."""
    gain = 1 - iteration(model, fabric, 32) / iteration(model, fabric, 32, overlap=False)
    return gain, iteration(model, fabric, 256) / iteration(model, fabric, 1)


def worst(backend: str, fabric: Fabric) -> float:
    pairs = [(said(model, fabric), STATED[backend, model]) for model in MODELS]
    return max(abs(ours / theirs - 1) for both in pairs for ours, theirs in zip(*both, strict=True))


def search(backend: str) -> Fabric:
    """Around the best so far, in ever smaller steps."""
    best = Fabric(bandwidth=BEGIN[0], latency=BEGIN[1])
    for factor in FACTORS:
        while True:
            around = [
                Fabric(bandwidth=best.bandwidth * factor**x, latency=best.latency * factor**y)
                for x in (-1, 0, 1)
                for y in (-1, 0, 1)
            ]
            better = min(around, key=lambda each: worst(backend, each))
            if worst(backend, better) >= worst(backend, best):
                break
            best = better
    return best


def main() -> int:
    errors = []
    for backend in ("NCCL", "Gloo"):
        fabric = search(backend)
        print(f"{backend}: {fabric.bandwidth / 1e9:.2f} GB/s a host, {fabric.latency * 1e6:.0f} µs a step")
        for model in MODELS:
            ours, theirs = said(model, fabric), STATED[backend, model]
            words = ("overlap saves, 32 GPUs", "256 GPUs, in local iterations")
            for what, mine, stated in zip(words, ours, theirs, strict=True):
                error = mine / stated - 1
                print(f"  {model:<9} {what:<30} stated {stated:5.3g}  simulated {mine:6.3f}  {error:+.0%}")
                errors.append((what, abs(error)))
            curve = [iteration(model, fabric, number) for number in GPUS]
            print(f"  {model:<9} ms at {', '.join(map(str, GPUS))} GPUs: {', '.join(f'{x * 1e3:.0f}' for x in curve)}")
    scaling = max(error for what, error in errors if what.startswith("256"))
    everything = max(error for _, error in errors)
    print(f"at 256 GPUs: at most {scaling:.1%} off (wanted {WANTED:.0%}); all eight: at most {everything:.1%}")
    return 0 if scaling <= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
