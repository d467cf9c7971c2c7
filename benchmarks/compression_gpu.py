"""How fast one GPU codes gradients: bytes of memory touched a second, beside a plain copy.

    PYTHONPATH=src python benchmarks/compression_gpu.py

GPT-2's 124 million gradients in float32. What counts is what has to be moved: numbers read and bytes written, or the
other way round. Variants are interleaved; medians of many rounds.
"""

import statistics
from collections.abc import Callable

import torch
from interleave import parser_of

from gradsync.core.reduction import fused
from gradsync.core.reduction.codings import Blocks

GPT2 = 124_439_808


def measure(variants: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, float]:
    """Bytes a second."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 3):
        for name, (run, _) in variants.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if number >= 3:
                times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: nbytes / statistics.median(times[name]) for name, (_, nbytes) in variants.items()}


def main() -> None:
    parser = parser_of(__doc__, rounds=50)
    parser.add_argument("--numel", type=int, default=GPT2, help="gradients")
    options = parser.parse_args()
    numel = options.numel // 256 * 256
    values = torch.randn(1, numel, device="cuda")
    target = torch.empty_like(values)
    variants: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: target.copy_(values), 2 * values.nbytes),
    }
    plain = fused.available
    for bits in (8, 4):
        coding = Blocks(bits, 256)
        row = torch.empty(1, coding.nbytes(numel), dtype=torch.uint8, device="cuda")
        moved = values.nbytes + row.nbytes
        for name, run in (
            ("quantise", lambda coding=coding, row=row: coding.encode(values, row)),
            ("dequantise", lambda coding=coding, row=row: coding.decode(row, target)),
        ):
            variants[f"{name} to {bits} bits" if name == "quantise" else f"{name} {bits} bits"] = (run, moved)
    found = measure(variants, options.rounds)
    fused.available = lambda tensor, block: False  # type: ignore[assignment]
    slow = measure(variants, max(3, options.rounds // 10))
    fused.available = plain  # type: ignore[assignment]
    print(f"{torch.cuda.get_device_name()}: {numel / 1e6:.0f}M gradients")
    print(f"{'':22}{'GB/s':>8}{'of a copy':>11}{'plain torch':>13}")
    for name, speed in found.items():
        print(f"{name:22}{speed / 1e9:8.0f}{speed / found['copy']:11.2f}{slow[name] / found['copy']:13.2f}")


if __name__ == "__main__":
    main()
