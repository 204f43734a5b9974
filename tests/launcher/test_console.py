"""What is shown of a run's warnings beside its progress."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launcher.local_job import run_scripts


def test_warning_is_shown_once_and_other_lines_not_at_all(tmp_path: Path) -> None:
    _, shown = run_scripts(tmp_path, *["echo 'a.py:3: UserWarning: old'; echo quiet"] * 2)

    assert shown.count("UserWarning: old") == 1
    assert "] a.py:3: UserWarning: old\n" in shown
    assert "quiet" not in shown


def test_what_an_agent_warns_of_is_shown_for_this_start_alone(tmp_path: Path) -> None:
    def warning(text: str) -> str:
        event = {"time": 1.0, "node": "node-0", "rank": None, "generation": 0, "step": None}
        told = json.dumps({**event, "event": "warning", "fields": {"text": text}})
        return f"""echo '{told}' >> "$(dirname "$0")/events.jsonl"\n"""

    _, first = run_scripts(tmp_path, warning("of old"), "true")
    _, second = run_scripts(tmp_path, warning("n1 may go on") * 2, "true")

    assert first.count("[node-0] of old\n") == 1
    assert second.count("[node-0] n1 may go on\n") == 1
    assert "of old" not in second
