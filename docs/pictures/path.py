"""Draws path.svg: the five stages of a gradient, from backward to the optimizer's step, on two ranks.

    python docs/pictures/walk.py

No library is needed; the picture is text.
"""

from drawing import (
    BACKWARD_FILL,
    FORWARD_FILL,
    HEIGHT,
    INK,
    MUTED,
    PANEL,
    STEP_FILL,
    WIRE_FILL,
    arrow,
    box,
    line,
    stop,
    text,
    write,
)

LANES = {0: 64.0, 1: 306.0}
LEFT, WIDTH, DEEP = 20.0, 902.0, 152.0
SLOTS = ("weight", "bias", "weight", "bias")


def lane(rank: int, y: float) -> list[str]:
    """One rank: parameters, the bucket their gradients land in, and the pipeline that starts it."""
    parts = [box(LEFT, y, WIDTH, PANEL, DEEP), text(LEFT + 14, y + 24, f"rank {rank}", size=15, anchor="start")]
    parts += [text(LEFT + 14, y + 50, "loss.backward()", size=12, anchor="start", mono=True)]
    for number, words in enumerate(("layer 2", "layer 1")):
        top = y + 62 + number * 34
        parts += [box(LEFT + 14, top, 112, BACKWARD_FILL, 28), text(LEFT + 70, top + 19, words)]
        parts += [arrow(LEFT + 130, top + 14, LEFT + 196, top + 14)]
    parts += [stop(LEFT + 161, y + 30, 1), text(LEFT + 161, y + 58, "ready", size=12, fill=MUTED)]
    parts += bucket(LEFT + 200, y + 66)
    parts += [stop(LEFT + 322, y + 30, 2), text(LEFT + 322, y + 58, "copied into its slot", size=12, fill=MUTED)]
    parts += [arrow(LEFT + 446, y + 93, LEFT + 520, y + 93), box(LEFT + 524, y + 58, 128, "white", 70, stroke=INK)]
    for number, words in enumerate(("starts when it is", "full and its turn", "has come")):
        parts += [text(LEFT + 588, y + 80 + number * 18, words, size=12)]
    parts += [stop(LEFT + 541, y + 30, 3), text(LEFT + 588, y + 35, "pipeline", size=12, fill=MUTED)]
    parts += [
        stop(LEFT + 769, y + 30, 5),
        text(LEFT + 786, y + 35, "mean in .grad", size=12, fill=MUTED, anchor="start"),
    ]
    parts += [box(LEFT + 758, y + 58, 128, STEP_FILL, 70), text(LEFT + 822, y + 97, "optimizer.step()", size=12)]
    parts += [arrow(LEFT + 704, y + 93, LEFT + 755, y + 93)]
    return parts


def bucket(x: float, y: float) -> list[str]:
    """The memory of a bucket: a slot a parameter, and the tail."""
    parts = []
    for number, words in enumerate(SLOTS):
        parts += [box(x + number * 52, y, 50, FORWARD_FILL, 54), text(x + number * 52 + 25, y + 32, words, size=11)]
    parts += [box(x + 208, y, 34, "white", 54, stroke=MUTED), text(x + 225, y + 32, "tail", size=11, fill=MUTED)]
    parts += [text(x + 121, y + 74, "a bucket; each .grad is a view of it", size=12, fill=MUTED)]
    return parts


def link(top: float, bottom: float) -> list[str]:
    """What lies between the ranks."""
    middle = (top + bottom) / 2
    parts = [
        box(LEFT + 524, middle - HEIGHT / 2, 200, WIRE_FILL),
        text(LEFT + 624, middle + 5, "reduction, over the link"),
    ]
    parts += [stop(LEFT + 506, middle, 4)]
    for start, end in ((top, middle - HEIGHT / 2), (bottom, middle + HEIGHT / 2)):
        parts += [arrow(LEFT + 636, start, LEFT + 636, end)]
    return parts


def main() -> None:
    parts = [text(LEFT, 36, "the path of a gradient", size=15, anchor="start")]
    for rank, y in LANES.items():
        parts += lane(rank, y)
    first, second = LANES.values()
    top, bottom = first + 128, second + 58
    parts += link(top, bottom)
    # Up and down again, to where the gradients lie.
    middle = (top + bottom) / 2
    parts += [line(LEFT + 704, middle - HEIGHT / 2, LEFT + 704, first + 92, stroke=MUTED)]
    parts += [line(LEFT + 704, middle + HEIGHT / 2, LEFT + 704, second + 94, stroke=MUTED)]
    words = "Every rank starts the same buckets in the same order, and ends with the same bits."
    parts += [text(LEFT, second + DEEP + 28, words, anchor="start")]
    write(__file__, LEFT * 2 + WIDTH, second + DEEP + 48, parts)


if __name__ == "__main__":
    main()
