"""The events of a small run, as its workers and launcher write them."""

from __future__ import annotations

from typing import Any

from resilience.events import Event


def event(
    name: str,
    time: float,
    rank: int | None = None,
    *,
    step: int | None = None,
    generation: int = 0,
    at: str | None = None,
    **fields: Any,
) -> Event:
    """Return an event of a node: of the rank's, or of the launcher, unless `at` says else."""
    node = at or ("launcher" if rank is None else f"node-{rank // 2}")
    return Event(
        time=time, node=node, rank=rank, generation=generation, step=step, event=name, fields=fields
    )


def step_event(number: int, time: float, loss: float | str = 2.0, **more: Any) -> Event:
    fields = {"loss": loss, "lr": 0.001, "duration_s": 0.5, "num_samples": 16 * (number + 1)}
    return event("step", time, 0, step=number, **{**fields, **more})


def all_ranks(name: str, time: float, **more: Any) -> list[Event]:
    return [event(name, time, rank, **more) for rank in range(4)]


def whole_run() -> list[Event]:
    """Return a run of 4 workers that takes 20 seconds and 4 steps."""
    return [
        event("run_started", 100.0),
        *begin(102.0, 105.0, 106.0, 108.0),
        *(step_event(number, 109.0 + number, 4.0 - number) for number in range(4)),
        event("checkpoint_started", 113.0, 0),
        event("checkpoint_written", 115.0, 0, path="/runs/x/checkpoint", num_bytes=2_500_000),
        *all_ranks("worker_finished", 116.0),
        event("run_finished", 120.0, exit_status=0, reason="all nodes succeeded"),
    ]


def on_node(name: str, time: float, generation: int, **fields: Any) -> Event:
    """Return an event of an agent, about no rank."""
    return event(name, time, at="node-0", generation=generation, **fields)


def begin(*times: float, generation: int = 0) -> list[Event]:
    """Return what 4 ranks tell as they begin, each stage at its time."""
    stages = ("worker_started", "process_group_ready", "data_ready", "model_ready")
    told = zip(stages, times, strict=True)
    return [each for name, at in told for each in all_ranks(name, at, generation=generation)]


def recovery(
    time: float, generation: int, step: int, roles: str = "kept kept kept kept", **more: Any
) -> list[Event]:
    """Return how 4 ranks come out of a fault at `time` that ended `generation`, in 2 seconds."""
    opened = generation + 1
    given = {"source": None, "num_bytes": more.get("num_bytes", 0)}
    return [
        *all_ranks("rank_stopped", time + 0.5, generation=generation, phase="computing"),
        on_node("generation_opened", time + 0.6, opened, world_size=4, num_faults=1),
        *all_ranks("process_group_ready", time + 1.0, generation=opened),
        *(
            event(
                "rank_recovered", time + 1.5, rank, step=step, generation=opened, role=role,
                **(more if role == "repaired" else given if rank == more.get("source") else {}),
            )
            for rank, role in enumerate(roles.split())
        ),
        *all_ranks("rank_resumed", time + 2.0, step=step, generation=opened),
    ]  # fmt: skip


def faulty_run() -> list[Event]:
    """Return a run of 8 steps that meets an injected exception and a worker that dies."""
    return [
        event("run_started", 100.0),
        on_node("node_joined", 100.5, 0, node="node-0"),
        *begin(101.0, 102.0, 103.0, 104.0),
        *(step_event(number, 105.0 + number, 8.0 - number) for number in range(3)),
        event("fault_injected", 108.0, 1, step=3, fault_kind="exception", place="forward"),
        event("fault_detected", 108.1, 1, reason="exception", text="InjectedFault: injected"),
        on_node("generation_broken", 108.1, 0, reason="exception"),
        *recovery(108.0, 0, 3),
        step_event(2, 109.9, 6.0, generation=1),
        *(step_event(number, 107.0 + number, 8.0 - number, generation=1) for number in (3, 4)),
        event("fault_detected", 111.5, 0, generation=1, reason="group", text="reset by peer"),
        event("fault_detected", 111.6, 2, generation=1, reason="died", text="killed by SIGKILL"),
        on_node("generation_broken", 111.6, 1, reason="killed by SIGKILL"),
        event("worker_replaced", 111.7, 2, generation=1, pid=7, reason="died"),
        *recovery(111.5, 1, 5, "rolled_forward kept repaired kept", source=1, num_bytes=2_000_000),
        *(step_event(number, 108.5 + number, 8.0 - number, generation=2) for number in (5, 6, 7)),
        *all_ranks("worker_finished", 117.0, generation=2),
        event("run_finished", 120.0, exit_status=0, reason="all nodes succeeded"),
    ]


def refounded_run() -> list[Event]:
    """Return a run of 4 steps whose nodes all die behind step 3: others begin it at step 2."""
    opened = 100
    fallback = {"reason": "no rank holds state", "source": "folder"}
    return [
        event("run_started", 100.0),
        on_node("node_joined", 100.1, -1, node="node-0"),
        on_node("generation_opened", 100.5, 0, world_size=4),
        *begin(101.0, 102.0, 103.0, 104.0),
        *(step_event(number, 105.0 + number, 8.0 - number) for number in range(4)),
        # What an agent says of others is no sign of life of a rank.
        on_node("nodes_wait", 108.2, 0, reason="one does not count yet", seconds=1.0),
        on_node("node_joined", 113.9, -1, node="node-2"),
        on_node("generation_opened", 114.0, opened, world_size=4),
        *begin(115.0, 116.0, 116.5, 117.0, generation=opened),
        *all_ranks("recovery_fallback", 117.5, step=2, generation=opened, **fallback),
        *all_ranks("rank_recovered", 117.6, step=2, generation=opened, role="started", num_bytes=0),
        *all_ranks("rank_resumed", 118.0, step=2, generation=opened),
        *(step_event(number, 117.0 + number, 8.0, generation=opened) for number in (2, 3)),
        *all_ranks("worker_finished", 121.0, generation=opened),
        event("run_finished", 122.0, exit_status=0, reason="all nodes succeeded"),
    ]


def tiered_run() -> list[Event]:
    """Return a run with checkpoints in tiers, which loses all its workers and goes on from one."""
    return [
        event("run_started", 100.0),
        *begin(101.0, 102.0, 103.0, 104.0),
        step_event(0, 105.0),
        event(
            "checkpoint_saved", 105.5, 0, step=1, num_bytes=1_500_000, seconds=0.4, blocked_s=0.1
        ),
        step_event(1, 106.0),
        *all_ranks("checkpoint_failed", 106.5, step=2, reason="no room"),
        step_event(2, 107.0),
        event(
            "checkpoint_saved", 107.5, 0, step=3, num_bytes=2_000_000, seconds=0.5, blocked_s=0.1
        ),
        event("fault_detected", 108.0, 1, reason="died", text="killed by SIGKILL"),
        on_node("generation_broken", 108.0, 0, reason="killed by SIGKILL"),
        *(
            event(
                "checkpoint_loaded", 109.0 + rank / 10, rank, step=3, generation=1,
                source="ram" if rank else "peer:node-1", num_bytes=2_000_000, seconds=0.25,
                num_bad=int(rank == 0),
            )
            for rank in range(4)
        ),
        *all_ranks(
            "recovery_fallback", 109.5, step=3, generation=1, reason="no replica",
            source="ram+peer:node-1",
        ),
        *recovery(108.0, 0, 3),
        step_event(3, 111.0, generation=1),
        *all_ranks("worker_finished", 112.0, generation=1),
        event("run_finished", 120.0, exit_status=0, reason="all nodes succeeded"),
    ]  # fmt: skip
