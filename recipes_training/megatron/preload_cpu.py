"""What a worker of Megatron on a CPU imports of it, for the node agent that forks it."""

from __future__ import annotations

from recipes_training.megatron.cpu import stand_in

stand_in()

# Only now: Megatron binds names of torch.cuda when it is imported.
import recipes_training.megatron.trainer  # noqa: E402

__all__ = ["recipes_training"]
