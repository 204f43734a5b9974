"""Settings of a Trainer that are refused before a step is taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

from resilience.errors import StateError
from resilience.frameworks import huggingface
from resilience.frameworks.huggingface import Trainer, move_checkpoint
from resilience.frameworks.trainer_state import TrainerProgress


def make_trainer(folder: Path, **options: Any) -> Any:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=4))
    row = torch.zeros(4, dtype=torch.long)
    known = {"output_dir": str(folder / "out"), "use_cpu": True, "report_to": [], "max_steps": 1}
    return Trainer(
        model=model,
        args=TrainingArguments(**{**known, **options}),
        train_dataset=[{"input_ids": row, "labels": row}] * 8,
        eval_dataset=[{"input_ids": row, "labels": row}],
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"auto_find_batch_size": True}, "auto_find_batch_size", id="batch-size"),
        pytest.param({"torch_compile": True}, "torch_compile", id="compile"),
        pytest.param({"eval_on_start": True, "eval_strategy": "steps"}, "eval_on_start", id="eval"),
    ],
)
def test_setting_that_is_not_kept_exact_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    trainer = make_trainer(tmp_path, **options)

    with pytest.raises(StateError, match=f"training with {words} is not kept exact"):
        trainer.train()


def test_group_that_the_arguments_leave_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU without use_cpu each rank would train by itself, as with the plain Trainer."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)

    with pytest.raises(StateError, match="to train on the CPU, set use_cpu=True"):
        make_trainer(tmp_path).train()


def test_state_of_a_step_has_no_copy_of_the_data(tmp_path: Path) -> None:
    """Rows in a list are plain values; to copy them took a step longer than the step."""
    trainer = make_trainer(tmp_path)
    trainer._tr_loss, trainer._globalstep_last_logged = torch.tensor(0.0), 0
    trainer.own_counts = [1]

    kept = TrainerProgress(trainer).state_dict()["attributes"]["values"]

    assert kept["own_counts"] == [1]
    assert not {"train_dataset", "eval_dataset"} & kept.keys()


def test_callback_that_a_resume_puts_in_the_place_of_another_is_followed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer._tr_loss, trainer._globalstep_last_logged = torch.tensor(0.0), 0
    trainer.current_flos = 0
    callbacks = trainer.callback_handler.callbacks
    callbacks.append(EarlyStoppingCallback())
    progress = TrainerProgress(trainer)
    callbacks[-1] = EarlyStoppingCallback()
    callbacks[-1].early_stopping_patience_counter = 2
    of_another = {**progress.state_dict(), "rank": -1}
    callbacks[-1] = EarlyStoppingCallback()

    progress.load_state_dict(of_another)

    assert callbacks[-1].early_stopping_patience_counter == 2


def test_other_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "VERSIONS", ("5.23.",))

    with pytest.raises(StateError, match=r"has another loop; allowed: 5\.23\.x"):
        make_trainer(tmp_path).train()


def test_name_that_is_no_trainer_is_an_error_of_its_own() -> None:
    with pytest.raises(ImportError, match="GRPOTrainer"):
        from resilience.frameworks.huggingface import (  # noqa: F401
            GRPOTrainer,  # type: ignore[attr-defined]
        )


def test_data_without_a_length_is_refused(tmp_path: Path) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    trainer = make_trainer(tmp_path)
    trainer.train_dataset = Endless()

    with pytest.raises(StateError, match="the training data has no length"):
        trainer.train()


def test_second_training_and_a_loop_of_ones_own_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="no")
    trainer.train()
    with pytest.raises(StateError, match=r"train\(\) a second time"):
        trainer.train()

    class Other(Trainer):  # type: ignore[valid-type, misc]
        def get_batch_samples(self, *given: Any) -> Any:
            return super().get_batch_samples(*given)

    other = make_trainer(tmp_path)
    other.__class__ = Other
    with pytest.raises(StateError, match="its own get_batch_samples"):
        other.train()


def test_save_that_on_log_asks_for_follows(tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_save = control.should_save or state.global_step == 1

    trainer = make_trainer(tmp_path, max_steps=2, logging_steps=1, save_strategy="no")
    trainer.add_callback(Asks())
    trainer.train()

    assert [each.name for each in (tmp_path / "out").iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("is_shared", [True, False])
def test_another_node_moves_a_checkpoint_of_its_own_alone(tmp_path: Path, is_shared: bool) -> None:
    """On a shared disk the first rank has moved it; else an older one may be in its place."""
    made, target = tmp_path / "saving" / "checkpoint-1", tmp_path / "checkpoint-1"
    target.mkdir()
    (target / "old").touch()
    (tmp_path / "saving").mkdir()
    if not is_shared:
        made.mkdir()
        (made / "new").touch()
    node = SimpleNamespace(
        state=SimpleNamespace(global_step=1, best_global_step=None),
        args=SimpleNamespace(world_size=1, should_save=False),
        is_world_process_zero=lambda: False,
        is_local_process_zero=lambda: True,
    )

    move_checkpoint(node, tmp_path / "saving")

    assert [each.name for each in target.iterdir()] == ["old" if is_shared else "new"]
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-1"]
