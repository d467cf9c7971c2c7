"""Numbers for people: short, with a unit, uniform along an axis."""

import math
from collections.abc import Sequence

__all__ = ["compact", "count", "duration", "saving", "size", "tick_labels"]


def compact(value: float) -> str:
    """A number as short as it can be read: 0.0003, 1.25, 850, 12k, 3.4M."""
    if not math.isfinite(value):
        return "not finite"
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.4g}{letter}".replace("-", "−")
    if value and abs(value) < 1e-3:
        return _with_exponent(value)
    return f"{value:.4g}".replace("-", "−")


def _with_exponent(value: float) -> str:
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")


def duration(seconds: float) -> str:
    """A time as text: 2 h 05 min, 12 s, 3.4 ms or 56 µs."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min {math.floor(seconds % 60):02d} s"
    # What would be rounded to 1000 of a unit is 1 of the next.
    units = ((0.9995, 1.0, "s"), (0.9995e-3, 1e3, "ms"), (-math.inf, 1e6, "µs"))
    factor, unit = next((factor, unit) for least, factor, unit in units if seconds >= least or not seconds)
    return f"{seconds * factor:.3g} {unit}"


def saving(seconds: float, share: float) -> str:
    """The gain of a change, in the one unit of all advice: milliseconds of a step, and the share of it."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:{',.0f' if milliseconds >= 99.95 else '.3g'}} ms a step ({share:.0%})"


def size(nbytes: float) -> str:
    """A number of bytes as text: 1.5 GiB."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
    factor, unit = next((factor, unit) for factor, unit in units if nbytes >= factor or factor == 1)
    return f"{nbytes / factor:.4g} {unit}" if nbytes / factor >= 1000 else f"{nbytes / factor:.3g} {unit}"


def count(number: int, noun: str, ending: str = "s") -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels for the values along an axis, all written alike: 2.0, 2.5, 3.0, or 0, 5e−4, 1e−3."""
    labels = [compact(value) for value in values]
    if any("e" in label for label in labels):
        return [_with_exponent(value) if value else "0" for value in values]
    if any(letter in label for label in labels for letter in "kMG"):
        return labels
    decimals = max((len(label.partition(".")[2]) for label in labels), default=0)
    return [f"{value:.{decimals}f}".replace("-", "−") for value in values]
