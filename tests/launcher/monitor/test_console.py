"""What is shown of a run's warnings beside its progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from resilience.events import read_events
from tests.launcher.local_job import run_scripts


def test_warning_is_shown_once_and_other_lines_not_at_all(tmp_path: Path) -> None:
    _, shown = run_scripts(tmp_path, *["echo 'a.py:3: UserWarning: old'; echo quiet"] * 2)

    assert shown.count("UserWarning: old") == 1
    assert "] a.py:3: UserWarning: old\n" in shown
    assert "quiet" not in shown


def test_what_an_agent_warns_of_is_shown_for_this_start_alone(tmp_path: Path) -> None:
    def warning(text: str) -> str:
        return telling("warning", text=text)

    _, first = run_scripts(tmp_path, warning("of old"), "true")
    _, second = run_scripts(tmp_path, warning("n1 may go on") * 2, "true")

    assert first.count("[node-0] of old\n") == 1
    assert second.count("[node-0] n1 may go on\n") == 1
    assert "of old" not in second


def test_a_step_that_is_gone_from_the_store_is_said_once(tmp_path: Path) -> None:
    loaded = telling("checkpoint_loaded", step=4, rank=0, source="folder", num_bytes=1, seconds=1.0)

    run_scripts(tmp_path, telling("step_stored", step=8, store="folder:x"), "true")
    _, shown = run_scripts(tmp_path, loaded * 2, "true")

    words = "the run goes on from step 4, and step 8 had been in the store\n"
    assert shown.count(f"[node-0] {words}") == 1
    assert f"  lost        {words}" in shown


def test_the_end_of_a_run_is_told_with_its_newest_generation(tmp_path: Path) -> None:
    run_scripts(tmp_path, "".join(telling("agent_started", generation=each) for each in (1, 3, 2)))

    assert read_events(tmp_path / "events.jsonl")[-1].generation == 3


def telling(
    name: str,
    *,
    step: int | None = None,
    rank: int | None = None,
    generation: int = 0,
    **fields: Any,
) -> str:
    """Return a line of a node's script that writes an event."""
    event = {"time": 1.0, "node": "node-0", "rank": rank, "generation": generation, "step": step}
    told = json.dumps({**event, "event": name, "fields": fields})
    return f"""echo '{told}' >> "$(dirname "$0")/events.jsonl"\n"""
