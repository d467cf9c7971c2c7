"""A reduction with state: each gradient sends its largest elements, and the rest is added to the next window's.
What was sent so far plus what is kept equals the sum of all gradients.

    torchrun --nproc-per-node 2 examples/stateful_reduction.py
"""

from typing import Any

import torch
from torch import Tensor, nn

import gradsync
from gradsync.communicator import Communicator, Handle
from gradsync.reduction import Reduction


class TopK(Reduction):
    """Sends the largest `share` of each gradient, by magnitude: first their places, then the values."""

    carries_tail = False  # only gradients are sent

    def __init__(self, share: float = 0.1) -> None:
        self.share, self.sent, self.seen = share, 0, 0
        self.residuals: dict[str, Tensor] = {}  # by name: right in every layout of buckets

    def __repr__(self) -> str:
        return f"TopK(share={self.share})"

    def prescale(self, bucket: Any, communicator: Communicator, divisor: float) -> float:
        return 1 / divisor  # so residuals are parts of a mean, and the next window may have another divisor

    def start(self, bucket: Any, communicator: Communicator, divisor: float) -> Handle:
        payload, gradients, chosen = bucket.payload, bucket.views_of(bucket.payload), []
        places = bucket.views_of(torch.arange(payload.numel(), dtype=torch.int32, device=payload.device))
        for spec, gradient, place in zip(bucket.specs, gradients, places, strict=True):
            # Without a gradient here there may be none anywhere, and what is sent is thrown away: keep the residual.
            if gradient.any() and spec.name in self.residuals:
                gradient += self.residuals.pop(spec.name).to(gradient)  # a loaded one may lie on another device
            count = int(self.share * gradient.numel()) or gradient.numel()  # a very small one is sent whole
            chosen.append(place.flatten()[gradient.flatten().abs().topk(count).indices])
        where = torch.cat(chosen)
        values, payload[where] = payload[where], 0
        self.residuals |= {s.name: g.clone() for s, g in zip(bucket.specs, gradients, strict=True) if g.any()}
        self.sent, self.seen = self.sent + where.numel(), self.seen + sum(view.numel() for view in gradients)
        all_where, all_values = (each.new_empty(communicator.world_size, each.numel()) for each in (where, values))

        def add() -> None:
            payload.zero_()
            for rank in range(communicator.world_size):  # in rank order: the same bits everywhere
                payload[all_where[rank]] += all_values[rank]

        first = communicator.all_gather(all_where.view(-1), where)
        return first.then(lambda: communicator.all_gather(all_values.view(-1), values)).then(add)

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": dict(self.residuals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.residuals = dict(state["residuals"])


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(torch.distributed.get_rank())  # other data on each rank; parameters are taken from rank 0
    model, reduction = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)), TopK()
    model = gradsync.DistributedDataParallel(model, reduction=reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(251):
        inputs = torch.randn(64, 16)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4].sum(1, keepdim=True).tanh())
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, sent {reduction.sent / reduction.seen:.1%} of the elements")
    print(f"parameters sum to {sum(parameter.sum().item() for parameter in model.parameters()):.6f}")


if __name__ == "__main__":
    main()
