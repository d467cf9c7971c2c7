"""Draws packages.svg: the packages of gradsync, and the way of a gradient down to the communicator and back.

    python docs/pictures/packages.py

They are those of pyproject.toml; a test compares them. No library is needed; the picture is text.
"""

from drawing import BACKWARD_FILL, FORWARD_FILL, INK, MUTED, PANEL, STEP_FILL, WIRE_FILL, arrow, box, stop, text, write

# From top to bottom: what a floor is for, its color, and its packages. Nothing imports from a floor above.
FLOORS = [
    ("names that scripts import", PANEL, ["errors", "lab", "plan", "reduction", "testing", "utils"]),
    ("the command line, and what it runs", PANEL, ["tools"]),
    ("Accelerate's interface", PANEL, ["accelerator"]),
    ("sharded and overlapped optimizers, local steps", FORWARD_FILL, ["optim"]),
    ("modules as replicas; gradients without a wrapper", FORWARD_FILL, ["parallel"]),
    ("where time goes, and would go", STEP_FILL, ["observe"]),
    ("autograd's hooks, the pipeline of buckets", BACKWARD_FILL, ["core.engine"]),
    ("what lies between two steps, and what it weighs", BACKWARD_FILL, ["core.window"]),
    ("what ranks send", BACKWARD_FILL, ["core.reduction"]),
    ("where gradients lie", BACKWARD_FILL, ["core.bucket"]),
    ("states on disk; which ranks are alive", PANEL, ["checkpoint", "health"]),
    ("what moves bytes", WIRE_FILL, ["communicator"]),
    ("errors, files, environment variables", PANEL, ["base"]),
]
# The stages of a gradient, by the package in which it makes them.
STOPS = {"core.engine": [1, 3, 5], "core.bucket": [2], "core.reduction": [3], "communicator": [4]}
LEFT, WIDTH, TALL, STEP = 110.0, 500.0, 34, 42


def main() -> None:
    parts = []
    for number, (purpose, fill, packages) in enumerate(FLOORS):
        y = 20.0 + number * STEP
        each = (WIDTH + 6) / len(packages)
        for place, package in enumerate(packages):
            x = LEFT + place * each
            parts += [box(x, y, each - 6, fill, TALL), text(x + (each - 6) / 2, y + 22, package, size=13, mono=True)]
            parts += [
                stop(LEFT - 20 - 26 * order, y + 17, n) for order, n in enumerate(reversed(STOPS.get(package, [])))
            ]
        parts += [text(LEFT + WIDTH + 16, y + 22, purpose, size=13, fill=MUTED, anchor="start")]
    bottom = 20.0 + len(FLOORS) * STEP
    parts += [arrow(14, 60, 14, bottom - 20, stroke=INK), text(28, 52, "imports", size=12, anchor="start")]
    words = "Numbers are the stages of a gradient: it goes down to the communicator, and comes back the same way."
    parts += [text(LEFT, bottom + 20, words, anchor="start")]
    write(__file__, LEFT + WIDTH + 340, bottom + 40, parts)


if __name__ == "__main__":
    main()
