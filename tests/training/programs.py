"""Programs for workers that tests need and users do not."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from resilience.events import EventLog, read_events
from training.__main__ import main


def write_norms(arguments: list[str]) -> int:
    """Take two steps and write the norm before and after clipping, by rank."""
    import torch

    from launcher.job import read_job
    from training.data.loading import open_samples
    from training.data.rank_batches import RankBatches
    from training.environment import parse_environment
    from training.group import open_group
    from training.plan import plan_split
    from training.stop import StopSignal
    from training.torch_trainer.model import build_model
    from training.torch_trainer.run import make_stepper
    from training.torch_trainer.step import gradient_norm

    job = read_job(Path(arguments[0].removeprefix("--job=")))
    run_dir = Path(arguments[1].removeprefix("--run-dir="))
    environment = parse_environment(os.environ)
    with open_group(environment, node="node-0", device_type="cpu") as group:
        samples = open_samples(job.data, job.model, run_dir=run_dir, group=group)
        model = build_model(job, job.trainer, group)
        stepper = make_stepper(job, model, group, StopSignal())
        split = plan_split(job, environment.world_size)
        batches = RankBatches(samples, seed=job.trainer.seed, split=split, rank=environment.rank)
        norms = []
        for step in range(2):
            rows = list(torch.from_numpy(batches.read(step)))
            before = stepper.run(rows, step=step, lr=1e-3).grad_norm
            after = gradient_norm(stepper.gradients(), model.num_sharded_copies)
            norms.append([before.hex(), after.item().hex()])
    (run_dir / f"norms-{environment.rank}.json").write_text(json.dumps(norms))
    return 0


def write_small_files(arguments: list[str]) -> int:
    """Train; files of the checkpoint hold 16 KiB."""
    from training.torch_trainer import run

    run.write_checkpoint = functools.partial(run.write_checkpoint, file_bytes_max=1 << 14)  # type: ignore[assignment]
    return main(arguments)


def stop_before_steps(arguments: list[str]) -> int:
    """Train; worker 0 is sent SIGTERM when its data is ready."""
    return _act_on_event("data_ready", rank=0, act=_terminate, arguments=arguments)


def fail_late(arguments: list[str]) -> int:
    """Train; a worker that fails ends when the others have failed as well."""
    events = Path(arguments[1].removeprefix("--run-dir=")) / "events.jsonl"
    status = main(arguments)
    world_size = int(os.environ["WORLD_SIZE"])
    while sum(each.event == "worker_failed" for each in read_events(events)) < world_size:
        os.sched_yield()
    return status


def stop_within_steps(arguments: list[str]) -> int:
    """Train; worker 0 is sent SIGTERM when it reports step 3."""
    return _act_on_event("step", rank=0, step=3, act=_terminate, arguments=arguments)


def stop_in_checkpoint(arguments: list[str]) -> int:
    """Train; worker 0 is sent SIGTERM when the checkpoint has begun."""
    return _act_on_event("checkpoint_started", rank=0, act=_terminate, arguments=arguments)


def fail_on_model(arguments: list[str]) -> int:
    """Train; worker 0 meets a bug when its model is ready."""
    return _act_on_event("model_ready", rank=0, act=_fail, arguments=arguments)


def die_once(arguments: list[str]) -> int:
    """Train; worker 0 dies at step 2 of the first generation."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return main(arguments)
    return _act_on_event("step", rank=0, step=2, act=lambda: os._exit(9), arguments=arguments)


def die_before_meeting(arguments: list[str]) -> int:
    """Train; node 1's worker dies in its first life, before it meets the other."""
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not is_first or "--node-name=node-1" not in arguments:
        return main(arguments)
    return _act_on_event("worker_started", rank=1, act=lambda: os._exit(9), arguments=arguments)


def spoil_weights(arguments: list[str]) -> int:
    """Train; worker 1's rows of the output layer are spoiled before the first step."""
    from training.torch_trainer import run

    build = run.build_model

    def build_and_spoil(*parts: Any) -> Any:
        import torch

        from training.torch_trainer.initial import local_part

        model = build(*parts)
        if os.environ["RANK"] == "1":
            with torch.no_grad():
                local_part(model.core.lm_head.weight).fill_(float("inf"))
        return model

    run.build_model = build_and_spoil
    return fail_late(arguments)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _fail() -> None:
    raise ZeroDivisionError("a bug")


def _act_on_event(
    event: str, *, rank: int, act: Any, arguments: list[str], step: int | None = None
) -> int:
    write = EventLog.write

    def write_and_act(
        log: EventLog, name: str, /, *, step: int | None = None, **fields: Any
    ) -> None:
        write(log, name, step=step, **fields)
        if name == event and wanted_step in (None, step) and int(os.environ["RANK"]) == rank:
            act()

    wanted_step = step
    EventLog.write = write_and_act  # type: ignore[method-assign]
    return main(arguments)


if __name__ == "__main__":
    sys.exit(globals()[os.environ.get("TEST_PROGRAM", "die_once")](sys.argv[1:]))
