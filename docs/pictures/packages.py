"""Draws packages.svg: the packages of gradsync, and the stages of a gradient in them.

    python docs/pictures/packages.py

A test compares the packages with those in pyproject.toml. The picture is text, so no library is needed.
"""

from drawing import BACKWARD_FILL, FORWARD_FILL, INK, MUTED, PANEL, STEP_FILL, WIRE_FILL, arrow, box, stop, text, write

# Layers from top to bottom: purpose, color, packages. No layer imports from one above.
LAYERS = [
    (
        "short names to import",
        PANEL,
        ["errors", "lab", "lightning", "plan", "reduction", "testing", "transformers", "utils"],
    ),
    ("the command line and its tools", PANEL, ["tools"]),
    ("Accelerate's interface", PANEL, ["accelerator"]),
    ("sharded and overlapped optimizers, local steps", FORWARD_FILL, ["optim"]),
    ("DistributedDataParallel, attach, averaging", FORWARD_FILL, ["parallel"]),
    ("recordings, explanations, plans", STEP_FILL, ["observe"]),
    ("autograd hooks, the pipeline of buckets", BACKWARD_FILL, ["core.engine"]),
    ("windows, weights, skip votes", BACKWARD_FILL, ["core.window"]),
    ("what ranks send", BACKWARD_FILL, ["core.reduction"]),
    ("gradient storage", BACKWARD_FILL, ["core.bucket"]),
    ("state on disk; which ranks are alive", PANEL, ["checkpoint", "health"]),
    ("transports", WIRE_FILL, ["communicator"]),
    ("errors, files, environment variables", PANEL, ["base"]),
]
# The stages of a gradient in each package.
STOPS = {"core.engine": [1, 3, 5], "core.bucket": [2], "core.reduction": [3], "communicator": [4]}
LEFT, WIDTH, TALL, STEP = 110.0, 500.0, 34, 42


def main() -> None:
    parts = []
    for number, (purpose, fill, packages) in enumerate(LAYERS):
        y = 20.0 + number * STEP
        each = (WIDTH + 6) / len(packages)
        for place, package in enumerate(packages):
            x = LEFT + place * each
            parts += [box(x, y, each - 6, fill, TALL), text(x + (each - 6) / 2, y + 22, package, size=13, mono=True)]
            parts += [
                stop(LEFT - 20 - 26 * order, y + 17, n) for order, n in enumerate(reversed(STOPS.get(package, [])))
            ]
        parts += [text(LEFT + WIDTH + 16, y + 22, purpose, size=13, fill=MUTED, anchor="start")]
    bottom = 20.0 + len(LAYERS) * STEP
    parts += [arrow(14, 60, 14, bottom - 20, stroke=INK), text(28, 52, "imports", size=12, anchor="start")]
    words = "The numbers are the stages of a gradient, which goes down to the communicator and comes back the same way."
    parts += [text(LEFT, bottom + 20, words, anchor="start")]
    write(__file__, LEFT + WIDTH + 340, bottom + 40, parts)


if __name__ == "__main__":
    main()
