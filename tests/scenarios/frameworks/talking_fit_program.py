"""A callback with a collective, after a validation."""

import torch
import torch.distributed as dist
from fit_program import Notes, main


def talk(self, trainer, module):
    if not trainer.sanity_checking:
        dist.all_reduce(torch.ones(1))


Notes.on_validation_end = talk
main()
