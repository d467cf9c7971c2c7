"""Draws overlap.svg: one step of one rank, with one message after backward, and with buckets during backward.

    python docs/pictures/overlap.py

No library is needed; the picture is text.
"""

from drawing import (
    BACKWARD_FILL,
    FORWARD_FILL,
    HEIGHT,
    INK,
    LINE,
    MUTED,
    STEP_FILL,
    WIRE_FILL,
    arrow,
    box,
    legend,
    line,
    text,
    write,
)

LEFT, ROW = 92.0, 46
FORWARD, LAYER, LAYERS = 150.0, 56.0, 6
# Milliseconds a bucket is on the wire, in the strokes of the picture, and the layers whose gradients it holds.
BUCKETS = [(84.0, (6, 5)), (84.0, (4, 3)), (66.0, (2, 1))]
STEP = 52.0


def backward(y: float) -> list[str]:
    parts = [box(LEFT, y, FORWARD - 2, FORWARD_FILL), text(LEFT + FORWARD / 2, y + 23, "forward")]
    for place in range(LAYERS):
        x = LEFT + FORWARD + place * LAYER
        parts += [box(x, y, LAYER - 2, BACKWARD_FILL), text(x + LAYER / 2, y + 23, f"layer {LAYERS - place}", size=12)]
    return parts


def step(x: float, y: float) -> list[str]:
    return [box(x, y, STEP, STEP_FILL), text(x + STEP / 2, y + 23, "step")]


def together(top: float) -> tuple[list[str], float]:
    """Everything in one message when backward has ended; and when the step is done."""
    parts = [text(LEFT, top, "all gradients after backward", size=15, anchor="start"), *backward(top + 16)]
    end = LEFT + FORWARD + LAYERS * LAYER
    wire = sum(seconds for seconds, _ in BUCKETS)
    y = top + 16 + ROW
    parts += [box(end, y, wire - 2, WIRE_FILL), text(end + wire / 2, y + 23, "all gradients")]
    parts += step(end + wire, top + 16)
    return parts, end + wire + STEP


def overlapped(top: float) -> tuple[list[str], float]:
    """A bucket travels as soon as it is full and its turn has come; and when the step is done."""
    parts = [text(LEFT, top, "buckets during backward", size=15, anchor="start"), *backward(top + 16)]
    end = LEFT + FORWARD + LAYERS * LAYER
    y, free = top + 16 + ROW, 0.0
    for number, (seconds, layers) in enumerate(BUCKETS):
        ready = LEFT + FORWARD + (LAYERS - layers[-1] + 1) * LAYER
        start = max(ready, free)
        parts += [
            line(ready - 1, top + 16 + HEIGHT, ready - 1, y, stroke=INK),
            box(start, y, seconds - 2, WIRE_FILL),
            text(start + seconds / 2, y + 23, f"bucket {number}", size=12),
        ]
        free = start + seconds
    parts += step(free, top + 16)
    parts += [
        line(end, top + 10, end, y + HEIGHT + 8, stroke=MUTED, dashed=True),
        text(end - 6, y + HEIGHT + 22, "hidden behind backward", fill=MUTED, size=12, anchor="end"),
        text(end + 6, y + HEIGHT + 22, "exposed", fill=MUTED, size=12, anchor="start"),
    ]
    return parts, free + STEP


def main() -> None:
    first, late = together(34.0)
    second, early = overlapped(180.0)
    parts = [*first, *second]
    for y in (50.0, 196.0):
        parts += [
            text(LEFT - 14, y + 23, "computes", anchor="end"),
            text(LEFT - 14, y + ROW + 23, "sends", anchor="end"),
        ]
    gained = 196.0 + HEIGHT / 2
    parts += [
        line(late, 40, late, gained + 12, stroke=LINE, dashed=True),
        arrow(late, gained, early + 3, gained),
        text((late + early) / 2, gained - 8, "gained", size=12, fill=MUTED),
    ]
    entries = [
        (FORWARD_FILL, "forward"),
        (BACKWARD_FILL, "backward, from the last layer to the first"),
        (WIRE_FILL, "communication"),
    ]
    parts += legend(LEFT, 320, entries)
    write(__file__, late + 24, 352, parts)


if __name__ == "__main__":
    main()
