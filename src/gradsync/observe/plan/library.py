"""Machines and models known from datasheets and papers, as calibrations that nobody has measured here.

``data/machines.json`` and ``data/models.json`` cite the source of each number. A layer of a model has a name,
parameters and its share of the work. The time of a micro-batch is its floating-point operations divided by what a
machine reaches of its peak, a third of it in forward. An optimizer reads and writes each parameter, its gradient and
its two moments.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.observe.plan.calibration import Calibration
from gradsync.observe.plan.network import Link, Topology, Transport
from gradsync.observe.plan.profile import BucketProfile, Jitter, StepProfile

__all__ = ["known_machines", "known_models", "published"]

FORWARD_SHARE = 1 / 3
# Of a parameter's bytes: it, its gradient and two moments read, it and the moments written.
OPTIMIZER_PASSES = 7
# Engines start a kernel or two a bucket; the rest runs beside compute.
HOST_SECONDS = 2e-5


@cache
def _data(name: str) -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = json.loads(
        files("gradsync.observe.plan").joinpath("data", name).read_text("utf-8")
    )
    return data


def known_machines() -> dict[str, str]:
    """The titles of the known machines, by name."""
    return {name: str(machine["title"]) for name, machine in _data("machines.json").items()}


def known_models() -> dict[str, str]:
    return {name: str(model["title"]) for name, model in _data("models.json").items()}


def published(machine: str, model: str, *, batch: int | None = None) -> Calibration:
    """A calibration of what a ``machine`` would do with a ``model``, with micro-batches of ``batch`` samples or the
    usual."""
    host, net = _entry("machines.json", "machine", machine), _entry("models.json", "model", model)
    samples = int(net["batch"]) if batch is None else batch
    if samples < 1:
        raise ConfigurationError(f"a micro-batch has at least one sample, got {samples}")
    seconds = float(net["flops"]) * samples / (float(host["flops"]) * float(host["utilization"]))
    layers = [*net["first"], *(layer for _ in range(int(net["blocks"])) for layer in net["block"]), *net["last"]]
    profile = _profile(layers, seconds, int(net["bytes_a_parameter"]))
    optimizer = OPTIMIZER_PASSES * profile.nbytes / float(host["memory_bandwidth"])
    between = Link(
        latency=float(host["between"]["latency"]),
        bandwidth=float(host["between"]["bandwidth"]) * float(host["efficiency"]),
    )
    inside = host["inside"]
    topology = Topology(
        ranks=int(host["ranks_per_host"]),
        ranks_per_host=int(host["ranks_per_host"]),
        between=between,
        inside=None if inside is None else Link(latency=inside["latency"], bandwidth=inside["bandwidth"]),
    )
    return Calibration(
        profile=replace(profile, optimizer=optimizer),
        transport=Transport(topology=topology, way=host["way"], start=float(host["start"])),
        jitter=Jitter(sigma=float(host["jitter"])),
        host=HOST_SECONDS,
        link=float(host["between"]["bandwidth"]),
        measured=False,
        facts={
            "machine": f"{host['title']}. {host['source']}",
            "model": f"{net['title']}. {net['source']}",
            "micro-batch": f"{samples} × {net['sample']}",
        },
    )


def _entry(file: str, kind: str, name: str) -> Mapping[str, Any]:
    known = _data(file)
    if name not in known:
        raise ConfigurationError(f"a {kind} of a plan is one of {', '.join(known)}; got {name!r}")
    return known[name]


def _profile(layers: Sequence[Sequence[Any]], seconds: float, bytes_each: int) -> StepProfile:
    """Layers one after the other, each as long as its share of the work."""
    whole = sum(float(work) for _, _, work in layers)
    forward, backward = FORWARD_SHARE * seconds, (1 - FORWARD_SHARE) * seconds
    pieces, done = [], 0.0
    for _, parameters, work in layers:
        need = forward * done / whole
        if parameters:
            # Its gradient is there when its own part of backward, the last of which comes first, is done.
            pieces.append((backward * (1 - done / whole), need, int(parameters) * bytes_each))
        done += float(work)
    pieces.sort(key=lambda piece: piece[0])
    buckets = tuple(
        BucketProfile(index=index, nbytes=nbytes, ready=min(max(ready, 0.0), backward), need=need)
        for index, (ready, need, nbytes) in enumerate(pieces)
    )
    return StepProfile(forward=forward, backward=backward, buckets=buckets)
