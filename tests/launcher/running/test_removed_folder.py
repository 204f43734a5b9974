"""Real runs whose folder is removed while they train."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.clusters.running.memory import find_arenas, remove_arenas
from resilience.events import EventReader

pytest.importorskip("torch", reason="a worker needs torch")
LIMIT_S = 240


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "recovers"),
    [("llama3_tiny_pretrain", False), ("llama3_tiny_checkpointless", True)],
)
def test_run_without_its_folder_saves_its_state_says_so_and_ends(
    tmp_path: Path, recipe: str, recovers: bool
) -> None:
    """What it has saved stays in the memory of its nodes, where its store was in the folder."""
    run, console = tmp_path / "run", tmp_path / "console"
    words = (f"recipe=llama/{recipe}", "trainer.max_steps=100000", f"run.dir={run}", "action=run")
    # Faults that are injected leave word of themselves in the folder.
    words += ("resilience.faults.injected=[]",) * recovers
    with console.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words], cwd=tmp_path, stdout=output, stderr=output
        )
    try:
        end_s, num_steps = time.monotonic() + LIMIT_S, 0
        reader = EventReader(run / "events.jsonl")
        while num_steps < 20:
            assert time.monotonic() < end_s, console.read_text()
            num_steps += sum(each.event == "step" for each in reader.read_new())
            time.sleep(0.05)

        run.rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone")

        assert process.wait(LIMIT_S) == 1
        said = console.read_text()
        assert f"the run's folder {run} was removed while it ran\n" in said
        assert "make room" not in said
        saved = said.partition("newest of step ")[2].partition(" ")[0]
        assert int(saved) > 20, said
        assert f"the store lacks step {saved}" in said
        assert len(find_arenas(run)) == 2, said
        assert not run.exists(), "nothing of it was made anew"
    finally:
        process.kill()
        process.wait()
        remove_arenas(run)
