"""The step gate: no optimizer steps on gradients that are not the mean, even where the host learns of it later.

On an accelerator the host does not read the ballot before it queues the optimizer step. Whether the step may be taken
is decided in one of two ways, and this module chooses between them:

on the device
    The ballot is converted there to a number that is 1.0 if the step must not be taken. torch's fused optimizers read
    it as ``found_inf``, which is how ``GradScaler`` makes them skip a step: parameters, momenta and step counts keep
    their bits. The host waits for nothing.
by the host
    Every other optimizer. The host waits for the ballot just before the step, so it cannot run ahead of the device.

The step must not be taken if

- the backward of some rank failed,
- something was requested that not all ranks know of,
- a rank raises at the end of this window; see [Note: late failures] in :mod:`gradsync.core.bucket.requests`,
- a collective was aborted, so that the buckets do not hold the mean. The flag is raised before the abort, and it is
  copied to the device after the collectives.
"""

from typing import Any

import torch

from gradsync.core.bucket.requests import Requests

__all__ = ["FoundInf", "forget_scaler", "reads_found_inf", "step_gate"]


@torch.no_grad()
def step_gate(ballot: torch.Tensor, flags: list[torch.Tensor]) -> torch.Tensor:
    """1.0 if no rank may step on the window of ``ballot``, else 0.0, on the ballot's device. ``flags`` are numbers on
    the host that are nonzero once the communicator has failed."""
    numbers = ballot.float()
    asked = ballot.numel() + Requests.VETO
    # The votes, and after them whether some rank is late.
    bad = numbers[:asked].sum()
    unheard = numbers[Requests.EVERYBODY] - numbers[Requests.KNOWN]
    bad = torch.addcmul(bad, numbers[asked : Requests.KNOWN].sum(), unheard)
    for flag in flags:
        bad = bad + flag.to(ballot.device, non_blocking=True)
    return torch.gt(bad, 0, out=torch.empty_like(bad))


def reads_found_inf(optimizer: Any) -> bool:
    """Whether the optimizer changes nothing where its attribute ``found_inf`` is 1.0.

    An optimizer that is not torch's declares this with an attribute ``reads_found_inf``.
    """
    said = getattr(optimizer, "reads_found_inf", None)
    if said is not None:
        return bool(said)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") and not _makes_momenta(optimizer, group) for group in optimizer.param_groups)


def _makes_momenta(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether this is the first step of SGD with momentum. It allocates uninitialized memory for the momenta, which a
    skipped step would not initialize."""
    if not group.get("momentum"):
        return False
    return not any("momentum_buffer" in optimizer.state.get(parameter, ()) for parameter in group["params"])


class FoundInf:
    """An optimizer's ``found_inf`` for one step, combined with what a ``GradScaler`` has put there."""

    def __init__(self, optimizer: Any, gates: list[torch.Tensor]) -> None:
        self._before = getattr(optimizer, "found_inf", None)
        found = gates[0]
        for gate in gates[1:]:
            found = torch.maximum(found, gate.to(found.device, non_blocking=True))
        if self._before is not None:
            # A scaler adds up over devices. Only a value of 1.0 has an effect.
            found = torch.maximum(found, self._before.to(found.device, non_blocking=True)).clamp(max=1.0)
        self._own = found
        optimizer.found_inf = found

    def take_back(self, optimizer: Any) -> None:
        """The step is over. Does nothing if the attribute was changed since."""
        if getattr(optimizer, "found_inf", None) is not self._own:
            return
        if self._before is None:
            del optimizer.found_inf
        else:
            optimizer.found_inf = self._before


def forget_scaler(optimizer: Any) -> None:
    """Remove what a ``GradScaler`` has put into the optimizer for a step that raises before it has begun. The scaler
    would not do it, and its scale would count twice in the next step."""
    if hasattr(optimizer, "found_inf") and hasattr(optimizer, "grad_scale"):
        del optimizer.found_inf, optimizer.grad_scale
