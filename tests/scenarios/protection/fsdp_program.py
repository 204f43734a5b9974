"""FSDP2 over two copies of two shards, with dropout and clipping."""

import torch
import torch.distributed as dist
from faults import Faults, note, write_digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    faults = Faults()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = faults.protect(model, optimizer)
    for inputs, targets in run.steps(loader, until=2 * len(loader)):
        with run.step():
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            faults.reach("tail")
            optimizer.zero_grad()
            note(run, loss=loss.item(), norm=norm.item())
    write_digest(run)
    dist.barrier()


main()
