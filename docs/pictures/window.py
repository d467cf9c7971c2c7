"""Draws window.svg: one window of three ranks, from micro-batches with weights to the optimizer's step.

    python docs/pictures/window.py

No library is needed; the picture is text.
"""

from pathlib import Path

# Tokens of each rank's micro-batches.
RANKS = [[96, 128, 64], [112, 80], []]
SCALE = 2.0
LEFT, TOP, ROW, HEIGHT = 92, 86, 62, 36
FORWARD = 0.36
INK, MUTED, LINE = "#1f2937", "#6b7280", "#d1d5db"
FORWARD_FILL, BACKWARD_FILL, WIRE_FILL, STEP_FILL = "#dbeafe", "#60a5fa", "#f59e0b", "#10b981"


def text(x: float, y: float, words: str, *, size: int = 13, fill: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, fill: str, height: float = HEIGHT) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="4" fill="{fill}"/>'


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
    legend = [
        (FORWARD_FILL, "forward"),
        (BACKWARD_FILL, "backward, accumulates in place"),
        (WIRE_FILL, "buckets on the wire, from the last backward on"),
    ]
    x = float(LEFT)
    for fill, words in legend:
        parts.append(box(x, below + 16, 14, fill, 14))
        parts.append(text(x + 20, below + 28, words, size=12, fill=MUTED, anchor="start"))
        x += 36 + 6.6 * len(words)
    width, height = end + 110, below + 48
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="white"/>'
        + "".join(parts)
        + "</svg>\n"
    )
    Path(__file__).with_name("window.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
