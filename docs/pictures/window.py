"""Draws window.svg: one window of three ranks, from micro-batches with weights to the optimizer's step.

    python docs/pictures/window.py

No library is needed; the picture is text.
"""

from drawing import (
    BACKWARD_FILL,
    FORWARD_FILL,
    HEIGHT,
    LINE,
    MUTED,
    STEP_FILL,
    WIRE_FILL,
    box,
    legend,
    text,
    write,
)

# Tokens of each rank's micro-batches.
RANKS = [[96, 128, 64], [112, 80], []]
SCALE = 2.0
LEFT, TOP, ROW = 92, 86, 62
FORWARD = 0.36


def micro_batch(x: float, y: float, tokens: int) -> list[str]:
    width = tokens * SCALE
    forward = width * FORWARD
    return [
        box(x, y, forward - 1, FORWARD_FILL),
        box(x + forward, y, width - forward - 3, BACKWARD_FILL),
        text(x + 6, y + HEIGHT / 2 + 5, f"w = {tokens}", anchor="start"),
    ]


def main() -> None:
    longest = max(sum(rank) for rank in RANKS) * SCALE
    start = LEFT + longest - RANKS[0][-1] * SCALE * 0.45
    end = LEFT + longest + 90
    parts = [text(LEFT, 30, "one window", size=15, anchor="start")]
    parts.append(f'<path d="M{LEFT} 42 H{end + 96}" stroke="{LINE}" stroke-width="2"/>')
    for number, tokens in enumerate(RANKS):
        y = TOP + number * ROW
        parts.append(text(LEFT - 14, y + HEIGHT / 2 + 5, f"rank {number}", anchor="end"))
        x = float(LEFT)
        for count in tokens:
            parts += micro_batch(x, y, count)
            x += count * SCALE
        if not tokens:
            parts.append(
                text(
                    x + 6, y + HEIGHT / 2 + 5, "no micro-batch: takes part, counts nothing", fill=MUTED, anchor="start"
                )
            )
        parts.append(box(end + 8, y, 80, STEP_FILL))
        parts.append(text(end + 48, y + HEIGHT / 2 + 5, "step"))
    tall = (len(RANKS) - 1) * ROW + HEIGHT
    parts.append(
        f'<rect x="{start:.1f}" y="{TOP - 6}" width="{end - start:.1f}" height="{tall + 12}" rx="6" '
        f'fill="{WIRE_FILL}" fill-opacity="0.35" stroke="{WIRE_FILL}"/>'
    )
    parts.append(text((start + end) / 2, TOP - 16, "one reduction", size=13))
    below = TOP + tall + 34
    formula = "gradient = Σ w·∇loss / Σ w, over all micro-batches of all ranks"
    total = " + ".join(str(count) for rank in RANKS for count in rank)
    parts.append(text(LEFT, below, formula, anchor="start"))
    parts.append(text(LEFT, below + 22, f"here Σ w = {total} = {sum(map(sum, RANKS))}", fill=MUTED, anchor="start"))
    below += 26
    entries = [
        (FORWARD_FILL, "forward"),
        (BACKWARD_FILL, "backward, accumulates in place"),
        (WIRE_FILL, "buckets being sent, from the last backward on"),
    ]
    parts += legend(float(LEFT), below + 16, entries)
    write(__file__, end + 110, below + 48, parts)


if __name__ == "__main__":
    main()
