"""Rank 1 does something else than rank 0, in the way that WAY says."""

import os
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience

WAY = os.environ["WAY"]


class Meter:
    """State of a user's own."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def main() -> None:
    dist.init_process_group("gloo")
    is_odd = dist.get_rank() == 1
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = Meter(is_odd if WAY == "also" else 0)
    run = resilience.protect(model, optimizer, also=[meter])
    if WAY == "protected twice":
        resilience.protect(nn.Linear(2, 1), [])
    run.every(3 if WAY == "functions" and is_odd else 2, lambda step: None)
    if WAY == "checkpoints" and is_odd:
        run.load_state_dict({"step": 2, "cursor": {"step": 1, "epoch": 0, "position": 1}})
    batches = [torch.ones(2, 4)] * (3 if WAY == "epochs" and is_odd else 4)
    for inputs in run.steps(batches, until=8 + (WAY == "until" and is_odd)):
        with run.step():
            loss = model(inputs).square().mean()
            loss.backward()
            with suppress(ValueError):
                if WAY == "caught" and is_odd and run.index == 3:
                    raise ValueError("of this rank's batch alone")
                if WAY == "stop" and is_odd and run.index == 3:
                    run.stop()
                optimizer.step()
    if WAY == "protected later":
        resilience.protect(nn.Linear(2, 1), [])


main()
