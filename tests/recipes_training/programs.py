"""Programs for workers that tests need and users do not."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from recipes_training.__main__ import main
from resilience.events import EventLog, read_events


def write_norms(arguments: list[str]) -> int:
    """Take two steps and write the norm before and after clipping, by rank."""
    from recipes_training import coordinator, loop
    from recipes_training.torch import trainer
    from recipes_training.torch.step import TorchStepper, gradient_norm

    # bf16 is refused for a CPU instance, and a machine with GPUs is not needed to look at norms.
    for module in (coordinator, loop, trainer):
        module.plan_device_type = lambda job: "cpu"  # type: ignore[attr-defined]
    run_dir = Path(arguments[1].removeprefix("--run-dir="))
    compute = TorchStepper.compute
    norms: list[list[str]] = []

    def compute_and_note(stepper: TorchStepper, rows: Any, *, step: int) -> Any:
        result = compute(stepper, rows, step=step)
        after = gradient_norm(stepper.gradients(), stepper._model.num_shards)
        norms.append([result.grad_norm.hex(), after.item().hex()])
        return result

    TorchStepper.compute = compute_and_note  # type: ignore[method-assign]
    status = main(arguments)
    (run_dir / f"norms-{os.environ['RANK']}.json").write_text(json.dumps(norms))
    return status


def ignore_warnings_of_megatron() -> None:
    """Take what Megatron warns of at its import for no error."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")


def train_quietly(arguments: list[str]) -> int:
    """Train, with Megatron or without."""
    ignore_warnings_of_megatron()
    return main(arguments)


def write_small_files(arguments: list[str]) -> int:
    """Train; files of the model hold 16 KiB."""
    from recipes_training.torch import trainer

    trainer.write_model = functools.partial(trainer.write_model, file_bytes_max=1 << 14)  # type: ignore[assignment]
    return main(arguments)


def fail_late(arguments: list[str]) -> int:
    """Train; a worker that fails ends when the others have failed as well."""
    events = Path(arguments[1].removeprefix("--run-dir=")) / "events.jsonl"
    status = main(arguments)
    world_size = int(os.environ["WORLD_SIZE"])
    while status and sum(e.event == "worker_failed" for e in read_events(events)) < world_size:
        os.sched_yield()
    return status


def _act_on_event(act: Any, event: str, arguments: list[str], *, step: int | None = None) -> int:
    """Train; worker 0 acts when it has written that event."""
    write, wanted_step = EventLog.write, step

    def write_and_act(
        log: EventLog, name: str, /, *, step: int | None = None, **fields: Any
    ) -> None:
        write(log, name, step=step, **fields)
        if name == event and wanted_step in (None, step) and os.environ["RANK"] == "0":
            act()

    EventLog.write = write_and_act  # type: ignore[method-assign]
    return main(arguments)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _fail() -> None:
    raise ZeroDivisionError("a bug")


# Worker 0 is sent SIGTERM when its data is ready, in step 3, and when the checkpoint has begun; or
# it meets a bug when its model is ready.
stop_before_steps = functools.partial(_act_on_event, _terminate, "data_ready")
stop_within_steps = functools.partial(_act_on_event, _terminate, "step", step=3)
stop_in_checkpoint = functools.partial(_act_on_event, _terminate, "checkpoint_started")
fail_on_model = functools.partial(_act_on_event, _fail, "model_ready")


def die_once(arguments: list[str]) -> int:
    """Train; worker 0 dies at step 2 of the first generation."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return main(arguments)
    return _act_on_event(lambda: os._exit(9), "step", arguments, step=2)


def run_spoiled(arguments: list[str]) -> int:
    """Train; TEST_SPOIL of tests.recipes_training.spoiled says what is wrong with a step."""
    from tests.recipes_training import spoiled

    getattr(spoiled, os.environ["TEST_SPOIL"])()
    return fail_late(arguments)


if __name__ == "__main__":
    sys.exit(die_once(sys.argv[1:]))
