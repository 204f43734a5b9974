"""What a newcomer sees first: the shipped recipes, whole, on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilience.event_files import event_files
from resilience.events import read_events
from tests.launcher.command import launch


def test_the_first_run_learns_and_leaves_a_model_and_a_report(tmp_path: Path) -> None:
    ended = launch("recipe=llama/llama3_tiny_pretrain", "action=run", folder=tmp_path)

    assert ended.status == 0, ended.out + ended.err
    run = tmp_path / "runs" / "llama3-tiny-pretrain"
    losses = [event.fields["loss"] for event in read_events(run / "events.jsonl")
              if event.event == "step"]  # fmt: skip
    assert len(losses) == 200
    assert losses[-1] < 0.7 * losses[0]
    writers = {
        file.name: {json.loads(line)["node"] for line in file.read_text().splitlines()}
        for file in event_files(run / "events.jsonl")
    }
    # Of a file to which two nodes append, NFS loses lines.
    assert writers == {
        "events.jsonl": {"launcher"},
        "events-node-0.jsonl": {"node-0"},
        "events-node-1.jsonl": {"node-1"},
    }
    assert (run / "checkpoint" / "model.safetensors").is_file()
    assert str(run / "report.html") in ended.out
    assert "src=" not in (run / "report.html").read_text().partition("<body")[0]


@pytest.mark.slow
def test_gpt_oss_learns_too(tmp_path: Path) -> None:
    ended = launch("recipe=gpt_oss/gpt_oss_tiny_pretrain", "action=run", "trainer.max_steps=25",
                   "run.dir=out", folder=tmp_path)  # fmt: skip

    assert ended.status == 0, ended.out + ended.err
    steps = [event for event in read_events(tmp_path / "out" / "events.jsonl")
             if event.event == "step"]  # fmt: skip
    assert len(steps) == 25
    assert steps[-1].fields["loss"] < 0.9 * steps[0].fields["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "llama/llama3_tiny_checkpointless",
        "llama/llama3_tiny_megatron_checkpointless",
        "gpt_oss/gpt_oss_tiny_megatron_checkpointless",
    ],
)
def test_run_learns_through_the_faults_of_its_recipe(tmp_path: Path, recipe: str) -> None:
    """Megatron on two nodes of two workers, which is where the recipe's groups lie."""
    ended = launch(f"recipe={recipe}", "action=run", "run.dir=out", folder=tmp_path)

    assert ended.status == 0, ended.out + ended.err
    events = list(read_events(tmp_path / "out" / "events.jsonl"))
    losses = {each.step: each.fields["loss"] for each in events if each.event == "step"}
    assert len(losses) == 200
    assert losses[199] < 0.7 * losses[0]
    injected = [each.fields["fault_kind"] for each in events if each.event == "fault_injected"]
    assert sorted(injected) == ["exception", "sigkill"]
    report = (tmp_path / "out" / "report.html").read_text()
    assert report.count('<span class="injected">injected</span>') == 2
    assert not [each for each in events if each.event == "recovery_fallback"]
    assert (tmp_path / "out" / "checkpoint" / "model.safetensors").is_file()
