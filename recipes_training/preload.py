"""Everything that a worker imports: a node agent imports this once and forks its workers.

Imports take seconds and a fork milliseconds, so a worker that takes over from a
dead one has nothing to import any more. None of these may start a thread.
"""

from __future__ import annotations

import torch.distributed.fsdp
import torch.optim
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.llama.modeling_llama

import recipes_training.recovery
import recipes_training.torch.trainer

__all__ = ["recipes_training", "torch", "transformers"]
