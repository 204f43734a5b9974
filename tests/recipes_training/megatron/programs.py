"""Programs for workers of Megatron that tests need and users do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.recipes_training.programs import ignore_warnings_of_megatron, train_quietly


def write_logits(arguments: list[str]) -> int:
    """Train; each rank of the last stage writes its part of the logits of the text in text.pt."""
    import torch

    from recipes_training.megatron.cpu import stand_in

    stand_in()
    ignore_warnings_of_megatron()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from recipes_training.megatron.trainer import MegatronTrainer

    export = MegatronTrainer.export
    run_dir = Path(arguments[1].removeprefix("--run-dir="))
    text = torch.load(run_dir / "text.pt")

    def export_and_compute(trainer: MegatronTrainer, folder: Path) -> None:
        export(trainer, folder)
        positions = torch.arange(text.shape[1]).expand_as(text)
        mask = trainer.stepper.mask(text.shape[1])

        def forward(_: Any, model: Any) -> Any:
            return model(text, positions, mask), lambda logits, **_: logits

        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([None]),
            model=[trainer._model.chunk],
            num_microbatches=1,
            seq_length=text.shape[1],
            micro_batch_size=text.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
        if found:
            name = f"logits-tp{parallel_state.get_tensor_model_parallel_rank()}.pt"
            torch.save(found[0].detach(), run_dir / name)

    MegatronTrainer.export = export_and_compute  # type: ignore[method-assign]
    return train_quietly(arguments)


def withhold(arguments: list[str]) -> int:
    """Train; no rank brings the output matrix of attention to the export."""
    from recipes_training.megatron.cpu import stand_in

    stand_in()
    ignore_warnings_of_megatron()
    from recipes_training.megatron import weights

    is_writer = weights._is_writer
    weights._is_writer = lambda model: (  # type: ignore[assignment]
        lambda name: is_writer(model)(name) and not name.endswith("linear_proj.weight")
    )
    return train_quietly(arguments)
