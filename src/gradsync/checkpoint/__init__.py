"""Durable checkpoints: written completely or not at all, and verified byte by byte before they are used.

    folder = CheckpointFolder("runs/7", communicator)
    folder.save(step, shared={"model": model.state_dict(), ...}, own={"rng": rng_state()}, facts={"lr": 0.1})
    loaded = folder.load()          # the newest good one, or None

Needs the ``safetensors`` package, which the extra ``checkpoint`` brings. Nothing is pickled.
"""

from gradsync.checkpoint.files import CorruptFileError, write_tensors
from gradsync.checkpoint.folder import CheckpointFolder, Loaded
from gradsync.checkpoint.tree import decode, encode, rng_state, set_rng_state

__all__ = [
    "CheckpointFolder",
    "CorruptFileError",
    "Loaded",
    "decode",
    "encode",
    "rng_state",
    "set_rng_state",
    "write_tensors",
]
