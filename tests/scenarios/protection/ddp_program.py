"""BatchNorm, dropout, AdamW, a scheduler, two epochs of a shuffling sampler with two workers."""

import torch
import torch.distributed as dist
from faults import OUT, Faults, note, write_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    faults = Faults()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2)
    layers = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    run = faults.protect(model, optimizer, also=[scheduler])
    run.every(4, lambda step: (OUT / f"saved-{step}-{dist.get_rank()}").touch())
    for inputs, targets in run.steps(loader, until=2 * len(loader)):
        with run.step():
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            faults.reach("tail")
            scheduler.step()
            faults.reach("scheduler")
            optimizer.zero_grad()
            run.log(loss=loss.item())
            note(run, loss=loss.item(), lr=scheduler.get_last_lr())
        faults.reach("below")
    write_digest(run)
    dist.barrier()
    dist.destroy_process_group()


main()
