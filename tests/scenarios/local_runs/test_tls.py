"""A run with cluster.tls, as a person starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.command import last_of_each, launch
from tests.launcher.real_runs import SMALL, named

TWO_NODES = (
    "recipe=llama/llama3_tiny_checkpointless",
    "resilience/tiered=ram",
    "trainer.num_nodes=2",
    "trainer.num_devices=1",
    "trainer.max_steps=12",
)
KILL = "resilience.faults.injected=[{kind: sigkill, place: backward, step: 6, rank: 1}]"
PLAIN = "resilience.faults.injected=[]"


@pytest.mark.slow
def test_two_nodes_with_daemons_and_a_killed_worker_train_the_same_model(tmp_path: Path) -> None:
    models = []
    for name, more in (("tls", ("cluster.tls=true", KILL)), ("plain", (PLAIN,))):
        words = last_of_each(*SMALL, *TWO_NODES, *more, f"run.dir={name}")
        ended = launch(*words, folder=tmp_path)
        assert ended.status == 0, ended.err
        models.append((tmp_path / name / "checkpoint" / "model.safetensors").read_bytes())

    assert models[0] == models[1]
    assert len(named(tmp_path / "tls", "fault_injected")) == 1
    assert not any(Path("/dev/shm").glob(f"*{tmp_path.name}*"))
