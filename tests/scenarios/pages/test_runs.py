"""What docs/runs.md has a person type, typed as it stands, one block after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.events import read_events

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "runs.md").read_text("utf-8")
SECTIONS = ("Start", "Look", "Stop", "Clean")


def block_of(section: str) -> str:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.mark.slow
def test_a_run_goes_on_and_has_a_branch_as_the_page_says(tmp_path: Path) -> None:
    text = block_of("Go on, and change") + block_of("Branch")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", text],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr + done.stdout
    assert "  trainer.max_steps: 20 -> 40\n" in done.stdout
    assert "  trainer.optimizer.lr: 0.003 -> 0.001\n" in done.stdout
    events = read_events(tmp_path / "runs" / "mine" / "events.jsonl")
    taken = {each.step: each.fields["start"] for each in events if each.event == "step"}
    assert taken[39] == 1
    assert {each.step for each in events if each.event == "checkpoint_loaded"} == {20}
    assert " begins in " in done.stdout
    branch = read_events(tmp_path / "runs" / "mine-branch" / "events.jsonl")
    assert {each.step for each in branch if each.event == "checkpoint_loaded"} == {40}
    assert max(each.step or 0 for each in branch if each.event == "step") == 59


def test_a_run_is_started_looked_at_stopped_and_cleaned_as_the_page_says(team: Path) -> None:
    text = "\n".join(f"echo '## {section}'\n{block_of(section)}" for section in SECTIONS)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", text],
        cwd=team, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    _, started, looked, stopped, cleaned = done.stdout.split("## ")
    assert " goes on in the background; " in started
    assert "llama3-tiny-pretrain  running  step 0 of 200  local\n" in looked
    assert "llama3-tiny-pretrain: running\n" in looked
    assert "node-0: 2026-11-24 10:00:02 node-0 is there\n" in looked
    assert " has ended after " in stopped
    assert "has left nothing beside " in cleaned
