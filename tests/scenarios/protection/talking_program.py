"""A set-up that communicates in many ways, and groups that the program keeps in variables."""

import os

import torch
import torch.distributed as dist
from faults import OUT, Faults, note, write_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    faults = Faults()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    told = [f"run of rank {rank}"]
    dist.broadcast_object_list(told, src=0)
    names: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"rank {rank}")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=pair)
    parts = [torch.arange(4.0) + 10 * rank] if rank == 0 else None
    own = torch.zeros(1)
    dist.scatter(own, list(parts[0].split(1)) if parts else None, src=0)
    newest = torch.tensor(len(list(OUT.glob("saved-*"))))
    dist.broadcast(newest, 0)
    for _ in range(int(newest)):
        dist.all_reduce(torch.ones(1))  # to load a checkpoint of shards communicates
    twin = dist.new_group()
    dist.all_reduce(total, group=twin)  # of the same ranks as the first group, and its first call
    dist.barrier()
    faults.reach("talking")
    (OUT / f"told-{rank}-{os.getpid()}").write_text(repr((told, names, total.item(), own.item())))
    torch.manual_seed(0)
    # Larger than what is noted: rank 0's weights are those of the run.
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run = faults.protect(model, optimizer)
    run.every(2, lambda step: (OUT / f"saved-{step}").touch())

    def talk(step: int) -> None:
        group, total = dist.new_group(), torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == dist.get_world_size()

    run.every(4, talk)
    for inputs in run.steps([torch.ones(4, 64) * each for each in range(6)], until=12):
        with run.step():
            loss = model(inputs + rank).square().mean()
            loss.backward()
            weight = loss.detach().clone()
            dist.all_reduce(weight, group=pair)
            optimizer.step()
            optimizer.zero_grad()
            note(run, loss=loss.item(), weight=weight.item())
    write_digest(run)


main()
