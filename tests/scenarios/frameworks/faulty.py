"""Places for faults in a Trainer, and what it ends with; imported by this folder's programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from resilience.frameworks import huggingface

sys.path.insert(1, str(Path(__file__).parents[1] / "protection"))
from faults import OUT, Faults, digest_state

FAULTS = Faults()
RANK = os.environ.get("RANK", "0")
TIMES = ("runtime", "per_second")


class FaultyRun(huggingface._TrainerRun):
    def __init__(self, loop: Any, model: Any, also: Any) -> None:
        optimizer = loop.trainer.optimizer.optimizer
        FAULTS.watch(model, optimizer)
        super().__init__(loop, model, also)
        FAULTS.follow(self, optimizer)


huggingface._TrainerRun = FaultyRun  # type: ignore[misc]


class Places:
    """Before a Trainer in a class's bases."""

    def log(self, *given: Any, **named: Any) -> None:
        FAULTS.reach("log")
        super().log(*given, **named)  # type: ignore[misc]
        FAULTS.reach("logged")

    def prediction_step(self, *given: Any, **named: Any) -> Any:
        FAULTS.reach("predict")
        return super().prediction_step(*given, **named)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> Any:
        FAULTS.reach("clip")
        return super()._clip_grad_norm(model)  # type: ignore[misc]

    def _save_checkpoint(self, *given: Any) -> None:
        FAULTS.reach("save")
        super()._save_checkpoint(*given)  # type: ignore[misc]


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in values.items() if not key.endswith(TIMES)}


def write_end(trainer: Any, result: Any) -> None:
    """Write down state, log and counts of a rank."""
    told: dict[str, Any] = {} if FAULTS.run is None else digest_state(FAULTS.run)
    told |= {"history": [without_times(each) for each in trainer.state.log_history]}
    told |= {"loss": result.training_loss, "flos": trainer.state.total_flos}
    told |= {"rate": trainer.lr_scheduler.state_dict()["last_epoch"], "step": result.global_step}
    (OUT / f"end-{RANK}.json").write_text(json.dumps(told))
