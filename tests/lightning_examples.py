"""Runs the examples for Lightning and Fabric with windows of 1, 2 and 4 micro-batches. They log and save in FOLDER.

    torchrun --nproc-per-node 2 tests/lightning_examples.py STRATEGY FOLDER

Strategies are "ddp" and "gradsync".
"""

import logging
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

EXAMPLES = Path(__file__).parent.parent / "examples" / "integrations"
NAMES = ("lightning_autoencoder", "lightning_language_model", "fabric_image_classifier", "fabric_language_model")
ACCUMULATIONS = (1, 2, 4)


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("torch's DistributedDataParallel is not asked for")


def main(strategy: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if strategy == "gradsync":
        DistributedDataParallel.__init__ = refuse  # type: ignore[method-assign]
    for name in NAMES:
        run = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        for count in ACCUMULATIONS:
            run(["--strategy", strategy, "--accumulate", str(count), "--folder", f"{folder}/{name}/{count}"])


if __name__ == "__main__":
    main(*sys.argv[1:])
