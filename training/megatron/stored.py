"""Where the values of a run's checkpoint stand in Hugging Face's layout. Pure, without Megatron."""

from __future__ import annotations

import re

from launcher.job.workload import GptOssModel, MegatronTrainer, Model
from training.megatron.names import Place

_NAME = re.compile(r"pp(\d+)-(tp|ep)(\d+)/(.+)/parameter")


def parse_stored(name: str, model: Model, trainer: MegatronTrainer) -> tuple[str, Place] | None:
    """Return parameter and place of what `MegatronState` has named; None for moments."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    stage, kind, number, parameter = int(found[1]), found[2], int(found[3]), found[4]
    experts = model.num_experts if isinstance(model, GptOssModel) else 0
    is_tensor = kind == "tp"
    return parameter, Place(
        tensor_rank=number if is_tensor else 0,
        tensor_size=trainer.tensor_parallel,
        first_layer=model.num_layers // trainer.pipeline_parallel * stage,
        first_expert=0 if is_tensor else experts // trainer.expert_parallel * number,
    )
