"""One rank of ``gradsync train --elastic``, with a roll call for a lighthouse: PORT TEXT FOLDER STEPS [again]."""

import sys
from pathlib import Path

from gradsync.health.elastic import Elastic
from gradsync.tools.llm.run import run_elastic
from gradsync.tools.llm.settings import TrainSettings
from tests.roll_call import join_roll_call

port, text, folder, steps, *again = sys.argv[1:]
settings = TrainSettings(
    model="nano",
    data=text,
    precision="fp64",
    micro_batch=2,
    grad_accum=2,
    sequence_length=16,
    steps=int(steps),
    checkpoint_every=10,
    validate_every=15,
    run_folder=Path(folder),
    resume=bool(again),
)
elastic = Elastic(timeout=10, look_every=0.3, join=join_roll_call(int(port)))
print(run_elastic(settings, cpu=True, elastic=elastic))
