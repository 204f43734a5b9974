"""What a rank of Megatron owns of the training state, as recovery and checkpoints see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from recipes_training.megatron.model import MegatronModel, Shard, is_expert
from resilience.state.view import NamedTensor


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
            (f"{_prefix(is_of_expert=each.is_expert)}/{each.name}/{kind}", each, tensor)
            for each in model.shards
            for kind, tensor in _contents(each)
        ]
        self._own_names = {
            f"{_prefix(is_of_expert=is_expert(each))}/{name}"
            for name, each in model.core.named_parameters()
        }
        self._other_prefixes = _all_prefixes() - {name.split("/")[0] for name in self._own_names}

    def tensors(self) -> list[NamedTensor]:
        """Return the same tensors each time, by parameter."""
        return [_named(*each) for each in self._entries]

    def leaves_out(self, name: str) -> bool:
        """Return whether the tensor is another rank's, as most are with a distributed optimizer."""
        prefix, *rest = name.split("/")
        return prefix in self._other_prefixes or "/".join([prefix, *rest[:1]]) in self._own_names

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


def _all_prefixes() -> set[str]:
    """Return the prefixes of the names that the ranks of all stages and parts have."""
    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }
    stages = range(parallel_state.get_pipeline_model_parallel_world_size())
    return {
        f"pp{stage}-{kind}{rank}"
        for stage in stages
        for kind, size in sizes.items()
        for rank in range(size)
    }


def _prefix(*, is_of_expert: bool) -> str:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if is_of_expert:
        return f"pp{stage}-ep{parallel_state.get_expert_model_parallel_rank()}"
    return f"pp{stage}-tp{parallel_state.get_tensor_model_parallel_rank()}"
