"""Reduce-scatter and all-gather by peer exchange against Gloo's all-reduce, and against bare sends and receives.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/peer_exchange.py

Two ranks. "bare" is the least that point-to-point messages of the group can take for the same bytes: a message each
way, a sum, a message each way, with tensors made beforehand. What it takes longer than Gloo's all-reduce is the price
of meeting twice; what peer exchange takes longer than it is ours.
"""

import itertools
from functools import partial

import torch
import torch.distributed as dist
from interleave import Step, interleave, parser_of, table

from gradsync.communicator import ProcessGroupCommunicator
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator

MIB = 2**20
FIRST_TAG = 1 << 20


def bare(group: dist.ProcessGroup, tensor: torch.Tensor) -> Step:
    backend = group._get_backend(torch.device("cpu"))
    rank = dist.get_rank(group)
    peer = 1 - rank
    shares = tensor.view(2, -1)
    arriving = torch.zeros_like(shares[0])
    tags = itertools.count(FIRST_TAG)

    def step() -> None:
        tag = next(tags)
        received, sent = backend.recv([arriving], peer, tag), backend.send([shares[peer]], peer, tag)
        received.wait()
        shares[rank].add_(arriving)
        sent.wait()
        tag = next(tags)
        received, sent = backend.recv([shares[peer]], peer, tag), backend.send([shares[rank]], peer, tag)
        received.wait()
        sent.wait()

    return step


def halves(communicator: PeerExchangeCommunicator, tensor: torch.Tensor, share: torch.Tensor) -> None:
    communicator.reduce_scatter(share, tensor).wait()
    communicator.all_gather(tensor, share).wait()


def all_reduce(communicator: ProcessGroupCommunicator | PeerExchangeCommunicator, tensor: torch.Tensor) -> None:
    communicator.all_reduce(tensor).wait()


def main() -> None:
    parser = parser_of(__doc__, rounds=60)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 8, 25, 100])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        raise SystemExit(f"two ranks are compared, got {dist.get_world_size()}. Start it with --nproc-per-node 2")
    group = dist.distributed_c10d._get_default_group()
    gloo, exchange = ProcessGroupCommunicator(group), PeerExchangeCommunicator(group)
    for size in options.mib:
        tensor = torch.zeros(size * MIB // 4)
        steps: dict[str, Step] = {
            "Gloo all-reduce": partial(all_reduce, gloo, tensor),
            "bare": bare(group, tensor),
            "RS + AG": partial(halves, exchange, tensor, tensor.view(2, -1)[exchange.rank]),
            "all-reduce": partial(all_reduce, exchange, tensor),
        }
        record = interleave(steps, warmup=5, rounds=options.rounds)
        if dist.get_rank() == 0:
            print(f"\n{size} MiB, {options.rounds} rounds")
            print(table(record, ["Gloo all-reduce"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
