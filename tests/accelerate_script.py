"""Runs Accelerate's own gradient-synchronization script with gradsync's Accelerator in the place of its own.

    torchrun --nproc-per-node 2 -m tests.accelerate_script

The script compares with Accelerate's arithmetic, so windows are divided and schedulers stepped as there. Its
`main` leaves some checks out on CPU ranks; they are run here too.
"""

import functools
import itertools

from accelerate.test_utils.scripts import test_sync as script
from accelerate.test_utils.training import RegressionDataset

from gradsync import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin


def accelerator(**options: object) -> Accelerator:
    options.setdefault("gradient_accumulation_plugin", GradientAccumulationPlugin.like_accelerate())
    return Accelerator(**options)  # type: ignore[arg-type]


def main() -> None:
    script.Accelerator = accelerator
    script.DataLoaderConfiguration = DataLoaderConfiguration
    script.GradientAccumulationPlugin = GradientAccumulationPlugin.like_accelerate
    # Drawn again in each run, the data now and then gives a rank's own gradient within allclose's tolerance of the
    # mean, and the script takes them for synchronized.
    script.RegressionDataset = functools.partial(RegressionDataset, seed=42)
    world = accelerator().state
    if world.num_processes > 1:
        for split, dispatch, each in itertools.product([True, False], repeat=3):
            script.test_gradient_accumulation(split, dispatch, each)
            script.test_gradient_accumulation_with_opt_and_scheduler(split, dispatch, each)
            print(f"passed with split_batches={split} dispatch_batches={dispatch} sync_each_batch={each}", flush=True)
    script.main()
    print(f"all passed on rank {world.process_index}", flush=True)


if __name__ == "__main__":
    main()
