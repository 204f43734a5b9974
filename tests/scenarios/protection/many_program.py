"""SGD, a scaler that skips steps, an average, accumulation, an evaluation between steps."""

import random

import numpy as np
import torch
import torch.distributed as dist
from faults import Faults, note, write_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

NUM_STEPS = 16


class Drawn(Dataset):
    """Samples that are drawn by three generators."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + float(np.random.rand())
        return torch.randn(16) + number / 48 + noise, torch.randn(1)


def main() -> None:
    faults = Faults()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Drawn(), batch_size=4, shuffle=True, num_workers=2)
    layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=NUM_STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    run = faults.protect(model, optimizer, also=[average, scheduler, scaler])

    def evaluate(step: int) -> None:
        faults.reach("evaluation")
        with torch.no_grad():
            total = model(torch.ones(2, 16) * step).sum()
        dist.all_reduce(total)
        faults.reach("evaluated")
        note(run, total=total.item(), step=step)

    run.every(3, evaluate)
    for batches in run.steps(loader, until=NUM_STEPS, accumulate=2):
        with run.step():
            for number, (inputs, targets) in enumerate(batches):
                model.require_backward_grad_sync = number == 1
                loss = (model(inputs) - targets).square().mean()
                bad = float("inf") if run.index in (4, 9) else 1.0
                scaler.scale(loss * bad / 2).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
            faults.reach("tail")
            optimizer.zero_grad()
            note(run, loss=loss.item(), scale=scaler.get_scale())
        scheduler.step()
        faults.reach("below")
    write_digest(run)


main()
