"""What a rank of Megatron owns of the training state, as recovery and checkpoints see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from resilience.state.view import NamedTensor
from training.megatron.model import MegatronModel, Shard


class MegatronState:
    """Main parameters and moments of this rank's part of the distributed optimizer; a StateView.

    Each is a flat part of a flat whole, which is named by stage, tensor or expert rank and
    parameter, so that another data-parallel size finds its own parts in it. The model's parameters
    are no part of the state: `settle` makes them of this.
    """

    def __init__(self, model: MegatronModel, *, replica: int, shard: str) -> None:
        self.replica = replica
        self.shard = shard
        self._entries = [
            (f"{_prefix(each)}/{each.name}/{kind}", each, tensor)
            for each in model.shards
            for kind, tensor in _contents(each)
        ]

    def tensors(self) -> list[NamedTensor]:
        """Return the same tensors each time, by parameter."""
        return [_named(*each) for each in self._entries]

    def owners(self) -> list[Tensor]:
        """Return them as the optimizer has them: whoever sets their `data` moves them."""
        return [tensor for _, _, tensor in self._entries]

    def read_rest(self) -> Mapping[str, Any]:
        """Return nothing: learning rates follow from the step."""
        return {}

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Take over nothing."""


def _contents(shard: Shard) -> list[tuple[str, Tensor]]:
    moments = shard.optimizer.state[shard.main]
    return [
        ("parameter", shard.main),
        *((f"optimizer/{key}", moments[key]) for key in sorted(moments)),
    ]


def _named(name: str, shard: Shard, tensor: Tensor) -> NamedTensor:
    if tensor.ndim == 0:
        return NamedTensor(name=name, tensor=tensor.detach())
    return NamedTensor(
        name=name, tensor=tensor.detach().view(-1), full_shape=(shard.size,), begin=(shard.begin,)
    )


def _prefix(shard: Shard) -> str:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if shard.is_expert:
        return f"pp{stage}-ep{parallel_state.get_expert_model_parallel_rank()}"
    return f"pp{stage}-tp{parallel_state.get_tensor_model_parallel_rank()}"
