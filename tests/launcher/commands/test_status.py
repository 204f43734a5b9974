"""How a run stands, by what its cluster and its events say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.running.cluster import RunFolder
from launcher.commands.sight import Sight
from launcher.commands.status import status_lines
from launcher.job import Job
from launcher.monitor.runstate import RunState, next_state, start_state
from launcher.monitor.standing import (
    CancelRequest,
    JobStatus,
    Phase,
    Standing,
    decide_standing,
    first_error,
)
from resilience.events import Event
from tests.launcher.script_job import script_job
from tests.launcher.shipped import shipped_job

NOW = 1000.0
ASKED = CancelRequest(user="ada", time=NOW - 60)
ASKED_TEXT = "ada asked for its end with `launcher cancel`, 1 min 00 s ago"


ELASTIC = shipped_job("llama/llama3_tiny_elastic", "local")
Happened = tuple[str, int | None, str, Mapping[str, Any]]


def opened(size: int, number: int = 1) -> Happened:
    """Return how a generation of so many workers was opened."""
    return ("n0", None, "generation_opened", {"number": number, "world_size": size})


def gone(node: str, text: str = "was killed") -> Happened:
    """Return how a launcher tells of the end of a node."""
    return ("launcher", None, "node_gone", {"node": node, "text": text})


STARTED: Happened = ("n0", 0, "worker_started", {})
STEPPED: Happened = ("n0", 0, "step", {"step": 7, "loss": 1.0, "duration_s": 0.1})


def state_of(job: Job, *happened: Happened) -> RunState:
    found = (
        Event(time=NOW, node=node, rank=rank, generation=0, step=fields.get("step"), event=name,
              fields=fields)
        for node, rank, name, fields in happened
    )  # fmt: skip
    return reduce(next_state, found, start_state(job, ()))


def state(*events: tuple[str, int | None, Mapping[str, Any]]) -> RunState:
    return state_of(
        shipped_job("llama/llama3_tiny_pretrain", "local"),
        *(
            ("launcher" if rank is None and name.startswith("run_") else "node-0", rank, name, more)
            for name, rank, more in events
        ),
    )


def lines_of(
    seen: RunState, job: Job, *, phase: Phase = Phase.RUNNING, why: str = "",
    path: Path = Path("run"), after_s: float = 0.0, left_out: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Return what `status` says of a run so long after its last event."""
    return status_lines(
        Sight(
            run=RunFolder(path=path, job=job),
            standing=Standing(phase=phase, why=why),
            state=seen,
            time=NOW + after_s,
            last_event=NOW,
            left_out=tuple(left_out),
        )
    )


def finished(status: int, reason: str) -> tuple[str, None, dict[str, Any]]:
    return ("run_finished", None, {"exit_status": status, "reason": reason})


REFUSED = {"service": "memoryd", "text": "refused to start: no room", "node": "node-0"}
NOTHING = state()
FAILED = state(("worker_failed", 1, {"message": "ValueError: no\nmore"}))
UNKEPT = state(("checkpoint_saved", 0, {"step": 5}), ("step", 0, {"step": 6}))
UNKEPT_TEXT = "step 7 is in no checkpoint; the newest is of step 5"
UNKEPT_HERE = state(
    ("checkpoint_saved", 0, {"step": 5}),
    ("step", 0, {"step": 6}),
    finished(130, f"stopped by SIGINT; {UNKEPT_TEXT}"),
)
SAVED_AT_THE_END = state(
    ("checkpoint_saved", 0, {"step": 1}),
    ("step", 0, {"step": 6}),
    ("state_saved", None, {"saved_step": 7, "place": "the tiers"}),
)
KEPT = state(("step", 0, {"step": 6}), ("checkpoint_saved", 0, {"step": 7}))
ALL_DONE = state(*(("worker_finished", rank, {}) for rank in range(4)))


@pytest.mark.parametrize(
    ("said", "seen", "asked", "expected"),
    [
        pytest.param((Phase.QUEUED, "Priority"), NOTHING, None, (Phase.QUEUED, "Priority"),
                     id="queued"),
        pytest.param((Phase.RUNNING, ""), NOTHING, None, (Phase.RUNNING, ""), id="running"),
        pytest.param((Phase.RUNNING, ""), NOTHING, ASKED,
                     (Phase.RUNNING, f"{ASKED_TEXT}, and is ending"), id="ending"),
        pytest.param((Phase.RUNNING, ""), state(finished(1, "node-0 failed")), None,
                     (Phase.RUNNING, ""), id="started-again-after-a-failure"),
        pytest.param((Phase.FAILED, "exit status 1"), FAILED, None,
                     (Phase.FAILED, "exit status 1; rank 1 on node-0: ValueError: no"),
                     id="first-error"),
        pytest.param((Phase.FAILED, "exit status 1"), state(("service_lost", None, REFUSED)), None,
                     (Phase.FAILED, "exit status 1; memoryd of node-0 refused to start: no room"),
                     id="first-error-before-any-worker"),
        pytest.param((Phase.FAILED, "exit status 1"),
                     state(("generation_opened", None, {}), ("service_lost", None, REFUSED)), None,
                     (Phase.FAILED, "exit status 1"), id="lost-on-the-way"),
        pytest.param((Phase.CANCELLED, ""), NOTHING, ASKED, (Phase.CANCELLED, ASKED_TEXT),
                     id="ended-as-we-asked"),
        pytest.param((Phase.FAILED, "exit status 1"), FAILED, ASKED,
                     (Phase.FAILED, "exit status 1; rank 1 on node-0: ValueError: no"),
                     id="was-failing-when-we-asked"),
        pytest.param((Phase.FORGOTTEN, "gone"), state(finished(1, "node-0 failed")), ASKED,
                     (Phase.FAILED, "node-0 failed"), id="was-failing-here-when-we-asked"),
        pytest.param((Phase.FORGOTTEN, "gone"), state(finished(130, "stopped by SIGINT")), ASKED,
                     (Phase.CANCELLED, f"{ASKED_TEXT}; stopped by SIGINT"),
                     id="stopped-as-we-asked"),
        pytest.param((Phase.CANCELLED, "its processes got SIGTERM"), UNKEPT, None,
                     (Phase.CANCELLED, ("not by this launcher; its processes got SIGTERM; "
                      f"{UNKEPT_TEXT}")), id="last-step-in-no-checkpoint"),
        pytest.param((Phase.FORGOTTEN, ""), UNKEPT_HERE, None,
                     (Phase.CANCELLED, f"stopped by SIGINT; {UNKEPT_TEXT}"),
                     id="last-step-in-no-checkpoint-told-once"),
        pytest.param((Phase.CANCELLED, ""), KEPT, ASKED, (Phase.CANCELLED, ASKED_TEXT),
                     id="last-step-kept"),
        pytest.param((Phase.FAILED, "exit status 75"), SAVED_AT_THE_END, None,
                     (Phase.FAILED, "exit status 75"), id="state-saved-by-nodes-that-gave-up"),
        pytest.param((Phase.RUNNING, ""), UNKEPT, None, (Phase.RUNNING, ""), id="steps-on"),
        pytest.param((Phase.SUCCEEDED, ""), NOTHING, ASKED, (Phase.SUCCEEDED, ""),
                     id="was-faster-than-we"),
        pytest.param((Phase.CANCELLED, ""), NOTHING, None,
                     (Phase.CANCELLED, "not by this launcher"), id="by-somebody-else"),
        pytest.param((Phase.FORGOTTEN, "gone"), NOTHING, None, (Phase.FORGOTTEN, "gone"),
                     id="forgotten"),
        pytest.param((Phase.FORGOTTEN, "gone"), NOTHING, ASKED,
                     (Phase.CANCELLED, f"{ASKED_TEXT}; gone"), id="deleted-as-we-asked"),
        pytest.param((Phase.FORGOTTEN, "gone"), ALL_DONE, None,
                     (Phase.SUCCEEDED, "by its events"), id="forgotten-after-its-end"),
        pytest.param((Phase.FORGOTTEN, "gone"), state(finished(0, "well")), None,
                     (Phase.SUCCEEDED, "well"), id="local-end"),
        pytest.param((Phase.FORGOTTEN, "gone"),
                     state(finished(0, "well"), ("run_started", None, {})), None,
                     (Phase.FORGOTTEN, "gone"), id="killed-after-another-start"),
        pytest.param((Phase.FORGOTTEN, "gone"), state(finished(7, "node-0 failed")), None,
                     (Phase.FAILED, "node-0 failed"), id="local-failure"),
        pytest.param((Phase.FORGOTTEN, "gone"), state(finished(130, "stopped by SIGINT")), None,
                     (Phase.CANCELLED, "stopped by SIGINT"), id="local-interrupt"),
        pytest.param((Phase.FORGOTTEN, "gone"), state(finished(143, "stopped by SIGTERM")), None,
                     (Phase.CANCELLED, "not by this launcher; stopped by SIGTERM"),
                     id="local-termination"),
        pytest.param((Phase.UNREACHABLE, "refused"), ALL_DONE, None,
                     (Phase.UNREACHABLE, "refused"), id="unreachable"),
        pytest.param((Phase.UNREACHABLE, "far"), state(finished(0, "well")), None,
                     (Phase.SUCCEEDED, "well"), id="ended-on-another-machine"),
    ],
)  # fmt: skip
def test_how_a_run_stands(
    said: tuple[Phase, str],
    seen: RunState,
    asked: CancelRequest | None,
    expected: tuple[Phase, str],
) -> None:
    phase, why = said

    standing = decide_standing(JobStatus(phase=phase, why=why), seen, asked, NOW)

    assert (standing.phase, standing.why) == expected


def test_status_says_what_size_an_elastic_run_has_and_why_not_another(tmp_path: Path) -> None:
    (tmp_path / "size.json").write_text('{"nodes": 4}')

    def size(*events: Happened) -> str:
        seen = state_of(ELASTIC, *events)
        lines = lines_of(seen, ELASTIC, path=tmp_path, after_s=10)
        (line,) = [line for line in lines if line.startswith("  size ")]
        return line.removeprefix("  size      ")

    assert size() == "none yet, 4 are asked for"
    three = opened(3 * ELASTIC.trainer.num_devices)
    assert size(three) == "3 nodes, 4 are asked for"
    leaving: Happened = ("n0", None, "node_leaving", {})
    lost: Happened = ("n0", None, "node_lost", {"node": "n0", "is_dead": True})
    assert size(three, leaving) == "3 nodes, 4 are asked for, n0 to leave"
    assert size(three, leaving, lost) == "3 nodes, 4 are asked for"
    wait = {"reason": "one does not count yet", "seconds": 55.0}
    held: Happened = ("n0", None, "nodes_wait", wait)
    assert size(three, held) == "3 nodes, 4 are asked for, one does not count yet, for 45 s"
    few: Happened = ("n0", None, "nodes_wait", {"reason": "3 nodes are there; sizes allowed: 1, 4"})
    assert size(three, held, few) == f"3 nodes, 4 are asked for, {few[3]['reason']}"
    assert size(three, held, opened(4 * ELASTIC.trainer.num_devices, 2)) == "4 nodes"


@pytest.mark.parametrize(("phase", "num", "expected"), [
    pytest.param(Phase.RUNNING, 1, "copies in 1 of 2 failure domains (ram.domains_min)",
                 id="too-few"),
    pytest.param(Phase.RUNNING, 2, None, id="enough"),
    pytest.param(Phase.SUCCEEDED, 1, None, id="ended"),
])  # fmt: skip
def test_status_says_in_how_many_failure_domains_copies_are(
    phase: Phase, num: int, expected: str | None
) -> None:
    seen = state(("failure_domains", 0, {"num": num, "wanted": 2}))
    lines = lines_of(seen, shipped_job("llama/llama3_tiny_tiered", "slurm"), phase=phase)
    (safe,) = [line[12:] for line in lines if line.startswith("  safe ")] or [None]

    assert safe == expected


def doing_and_size(happened: Sequence[Happened]) -> list[str]:
    """Return what `status` says that an elastic run does, and of its size."""
    lines = [line.split(maxsplit=1) for line in lines_of(state_of(ELASTIC, *happened), ELASTIC)]
    return [text for name, text in lines if name in ("doing", "size")]


@pytest.mark.parametrize("recipe", ["llama3_tiny_pretrain", "llama3_tiny_checkpointless"])
@pytest.mark.parametrize(
    ("every", "after_s", "told"),
    [
        pytest.param(1, 240.0, "no step for 4 min 00 s", id="long"),
        pytest.param(1, 6.5, "no step for 6.5 s", id="three-times-the-usual"),
        pytest.param(1, 5.5, None, id="less"),
        pytest.param(10, 59.0, None, id="ten-steps-are-reported-at-once"),
        pytest.param(10, 61.0, "no step for 1 min 01 s", id="ten-steps-late"),
    ],
)
def test_status_says_that_no_step_comes(
    recipe: str, every: int, after_s: float, told: str | None
) -> None:
    """Instead of the time left; the one step that stood still before is not the usual one."""
    job = shipped_job(f"llama/{recipe}", "local")
    start = replace(start_state(job, ()), log_every_n_steps=every)
    steps = [
        Event(time=NOW - after_s, node="node-0", rank=0, generation=0, step=number, event="step",
              fields={"loss": 2.0, "duration_s": 900.0 if number == 1 else 2.0})
        for number in range(5)
    ]  # fmt: skip
    text = "\n".join(lines_of(reduce(next_state, steps, start), job))

    assert ("no step for" in text) == (told is not None) == (" left" not in text)
    assert told is None or f"workers), {told}\n" in text


def test_status_says_what_of_the_events_was_left_out() -> None:
    left_out = ("events-n1.jsonl, line 2: no event", "events-n2.jsonl cannot be read")
    lines = lines_of(NOTHING, ELASTIC, after_s=3, left_out=left_out)
    told = "; ".join(f"left out: {each}" for each in left_out)
    assert f"the last 3.0 s ago; {told}" in "\n".join(lines)


def test_status_names_silent_nodes_that_the_run_waits_for() -> None:
    def lost(node: str, *, is_dead: bool) -> Happened:
        return ("n0", None, "node_lost", {"node": node, "is_dead": is_dead})

    def doing(*events: Happened) -> str:
        return doing_and_size([opened(1), STARTED, STEPPED, *events])[0]

    silent = [lost("n2", is_dead=False), lost("n1", is_dead=False)]
    assert doing(*silent) == "waiting for n1, n2: not heard from"
    goes_on = "process group (1 of 1 workers)"
    for event in (
        lost("n2", is_dead=True),
        ("n0", None, "node_joined", {"node": "n2"}),
        ("n0", None, "node_ended", {"node": "n2", "reason": "the node is off"}),
    ):
        assert doing(*silent, event) == "waiting for n1: not heard from"
    assert doing(*silent, STEPPED) == doing(*silent, opened(1)) == goes_on
    assert doing(lost("n1", is_dead=True)) == goes_on


@pytest.mark.parametrize(
    ("seen", "more", "error"),
    [
        (NOTHING, {"words": "no script"}, "no script"),
        (FAILED, {"words": "the run ends"}, "rank 1 on node-0: ValueError: no"),
        (FAILED, {"cause": "the agent of n1 was killed"}, "the agent of n1 was killed"),
    ],
)
def test_first_error_is_the_clusters_cause_or_the_events_or_the_agents_words(
    seen: RunState, more: Mapping[str, str], error: str
) -> None:
    said = JobStatus(phase=Phase.FAILED, why="exit status 1", **more)
    standing = decide_standing(said, seen, None, NOW)
    assert (standing.error, standing.why) == (error, f"exit status 1; {error}")


def test_status_and_runs_say_which_nodes_have_not_joined() -> None:
    """By what agents have written, and of a run that they gave up how many had come."""
    begun: list[Happened] = [(node, None, "agent_started", {"start": "7-0"}) for node in ("a", "b")]
    waits = [*begun, ("a", None, "node_joined", {"node": "a"})]
    job = script_job(num_nodes=3, num_devices=2)
    gave_up: Happened = ("a", None, "gave_up", {"reason": "1 of 3 nodes joined"})

    def doing(*more: Happened) -> str:
        return "\n".join(lines_of(state_of(job, *waits, *more), job, after_s=31.0))

    told = "waiting for 2 of 3 nodes: b has not joined, no agent has begun on 1 of them"
    assert f"starting workers (0 of 6 workers), {told}\n" in doing()
    assert "waiting" not in doing(opened(6))
    assert first_error(state_of(job, *waits, gave_up)) == "1 of 3 nodes joined"


def test_status_says_once_why_a_run_gave_up() -> None:
    reason = "no node took the place of lost n1 within 135 s"
    broken = ("n0", None, "generation_broken", {"reason": "n1 is gone"})
    seen = state_of(ELASTIC, opened(4), broken, ("n0", None, "gave_up", {"reason": reason}))
    why = f"n0 ended with exit status 75; {reason}"

    text = "\n".join(lines_of(seen, ELASTIC, phase=Phase.FAILED, why=why))

    assert (text.count(reason), text.count("faults    1")) == (1, 1)
    assert text.count("no step came") == 0


def test_status_says_which_lost_node_is_waited_for_and_until_when() -> None:
    """By the scheduler's name; the workers that went with the node are not there."""
    awaited = {"reason": "n1 or another node", "seconds": 132.0}
    ranks = [(f"n{rank // 2}", rank) for rank in range(3)]
    happened = [
        *((node, rank, "worker_started", {}) for node, rank in ranks),
        *(("n0", rank, "rank_stopped", {}) for rank in (0, 1)),
        ("n0", None, "node_lost", {"node": "n1", "is_dead": False}),
        ("n0", None, "node_awaited", awaited),
    ]

    assert doing_and_size(happened)[0] == (
        "recovery (2 of 3 workers), waiting for n1 or another node, 2 min 12 s more"
    )
    assert "waiting" not in doing_and_size([*happened, opened(3)])[0]


@pytest.mark.parametrize(
    ("phase", "kept", "left", "next_"),
    [
        (Phase.RUNNING, "checkpoint of step 5", False, False),
        (Phase.UNREACHABLE, "checkpoint of step 5", False, False),
        (Phase.FAILED, "checkpoint of step 5 when it ended", True, True),
        (Phase.CANCELLED, "checkpoint of step 5 when it ended", True, True),
        (Phase.SUCCEEDED, "checkpoint of step 5 when it ended", True, False),
    ],
)
def test_only_of_a_run_that_has_ended_status_says_what_it_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
    kept: str,
    left: bool,
    next_: bool,
) -> None:
    """A scheduler that gives no answer says nothing of an end."""
    monkeypatch.setattr("launcher.commands.status.find_memory", lambda run: [Path("/dev/shm/m")])
    job = shipped_job("llama/llama3_tiny_tiered", "slurm")
    shown = lines_of(UNKEPT, job, phase=phase, path=tmp_path)
    lines = {line[2:12].strip(): line[12:] for line in shown[1:]}

    assert lines["safe"] == kept
    assert lines.get("left") == ("/dev/shm/m, which `clean` removes" if left else None)
    assert lines.get("next") == (f"launcher continue {tmp_path}" if next_ else None)


def test_status_says_in_one_line_why_a_scheduler_gave_no_answer(tmp_path: Path) -> None:
    why = "scontrol ended with 1:\ntimed out"
    first = lines_of(UNKEPT, ELASTIC, phase=Phase.UNREACHABLE, why=why, path=tmp_path)[0]
    assert first.endswith(": unreachable: scontrol ended with 1: timed out")


def test_status_names_the_batch_that_is_waited_for() -> None:
    """Until a step is taken, or the size has changed: then it is told of anew."""
    late: Happened = ("n0", 0, "batch_late", {"step": 7, "text": "batch 7 has not come yet"})

    def doing(*events: Happened) -> str:
        return doing_and_size([opened(1), STARTED, *events])[0]

    assert doing(late) == "process group (1 of 1 workers), batch 7 has not come yet"
    assert doing(late, STEPPED) == doing(late, opened(1)) == "process group (1 of 1 workers)"


def test_status_tells_of_nodes_that_have_ended() -> None:
    """Of the last one that trained no other can, and its workers are in the events still."""
    happened: list[Happened] = [
        opened(1),
        STARTED,
        gone("n1", "ended with exit status 1"),
        gone("n0"),
        ("n0", None, "agent_started", {}),
    ]

    def shown(num_events: int) -> list[str]:
        return doing_and_size(happened[:num_events])

    assert shown(2) == ["process group (1 of 1 workers)", "1 node, 3 are asked for"]
    one_gone = "1 node, 3 are asked for, n1 ended with exit status 1"
    assert shown(3) == ["process group (1 of 1 workers)", one_gone]
    none_left = "1 node, 3 are asked for, n0 was killed, n1 ended with exit status 1"
    assert shown(4) == ["waiting for a node: none that trained is left", none_left]
    assert shown(5) == ["starting workers (0 of 1 workers)", one_gone]


def test_status_counts_no_workers_of_nodes_that_were_killed() -> None:
    """Before another generation nobody may be left who tells of that."""
    trained: list[Happened] = [opened(2), STARTED, ("n1", 1, "worker_started", {})]

    assert doing_and_size(trained)[0] == "process group (2 of 2 workers)"
    assert doing_and_size([*trained, gone("n1")])[0] == "process group (1 of 2 workers)"


def test_a_start_that_a_scheduler_made_knows_no_node_of_the_one_before() -> None:
    """Nodes that were to leave ended with it; no launcher writes that the run begins again."""
    job = shipped_job("llama/llama3_tiny_elastic", "slurm")
    before: list[Happened] = [
        *((name, None, "agent_started", {"start": "7-0"}) for name in ("n0", "n1", "n2")),
        opened(3, 4),
        *((f"n{rank}", rank, "worker_started", {}) for rank in range(3)),
        STEPPED,
        ("n1", None, "node_lost", {"node": "n1", "is_dead": False}),
        ("n2", None, "node_leaving", {}),
    ]
    again: list[Happened] = [
        ("n0", None, "agent_started", {"start": "7-1"}),
        ("n1", None, "agent_started", {"start": "7-1"}),
        ("n2", None, "agent_started", {"start": "7-0"}),  # a word of before that comes late
    ]

    old, new = state_of(job, *before), state_of(job, *before, *again)

    assert (old.nodes_to_leave, old.silent_nodes) == ({"n2"}, {"n1"})
    assert not (new.nodes_to_leave | new.silent_nodes | new.lost_nodes | new.training_nodes)
    assert (new.num_steps, new.has_opened) == (8, False)


def test_what_a_service_lost_goes_with_its_nodes_next_agent() -> None:
    """A Kubernetes Job makes all pods anew within one start, which no agent's name tells."""
    begun, lost = ("agent_started", None, {"start": "7-0"}), ("service_lost", None, REFUSED)
    other = ("service_lost", None, {**REFUSED, "node": "node-1"})

    def losses(*events: tuple[str, int | None, Mapping[str, Any]]) -> list[str]:
        return list(state(*events).losses)

    text = "memoryd of node-{} refused to start: no room"
    assert losses(begun, lost, other) == [text.format(0), text.format(1)]
    assert losses(begun, lost, other, begun) == [text.format(1)]
    assert losses(begun, lost, begun, lost) == [text.format(0)]


def test_workers_of_a_nodes_earlier_agent_train_no_more() -> None:
    trained = state(*(("worker_started", rank, {}) for rank in range(4)))

    assert trained.num_here == 4
    again = state(
        *(("worker_started", rank, {}) for rank in range(4)),
        ("agent_started", None, {"start": "7-0"}),
    )
    assert (again.phase, again.num_here) == ("starting workers", 0)


def test_a_node_that_has_left_is_not_to_leave_any_more() -> None:
    """Where the run ends with it, nobody else tells of that."""
    left = state(("node_leaving", None, {}), ("node_left", None, {}))

    assert not left.nodes_to_leave


def test_a_run_that_goes_on_has_the_size_of_its_job_until_it_begins() -> None:
    """It is asked for 3 nodes, and was left with 2."""
    continued: Happened = ("launcher", None, "run_continued", {"changes": []})
    begun: Happened = ("launcher", None, "run_started", {})
    states = [
        state_of(ELASTIC, *each)
        for each in ([opened(2)], [opened(2), continued], [opened(2), continued, begun])
    ]
    assert [each.num_workers for each in states] == [2, 3, 3]
