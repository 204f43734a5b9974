"""Real runs whose folder is removed while they train."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilience.events import EventReader
from resilience.tiered.arena_folder import find_arenas, remove_arena

pytest.importorskip("torch", reason="a worker needs torch")
LIMIT_S = 240


def read_all(folder: Path) -> dict[Path, bytes]:
    """Return the content of all files of a folder, but for those of a store."""
    paths = (
        path for path in folder.rglob("*") if path.is_file() and "checkpoints" not in path.parts
    )
    return {path.relative_to(folder): path.read_bytes() for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "recovers", "is_replaced"),
    [
        ("llama3_tiny_pretrain", False, False),
        ("llama3_tiny_checkpointless", True, False),
        ("llama3_tiny_pretrain", False, True),
    ],
)
def test_run_without_its_folder_saves_its_state_says_so_and_ends(
    tmp_path: Path, recipe: str, recovers: bool, is_replaced: bool
) -> None:
    """Its checkpoints stay in the memory of its nodes, where its store was in the folder.

    Another run's folder that has the name then, with files of the same names, stays as it is.
    """
    run, console, other = tmp_path / "run", tmp_path / "console", tmp_path / "other"
    words = (f"recipe=llama/{recipe}", "trainer.max_steps=100000", f"run.dir={run}", "action=run")
    arenas: list[Path] = []
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

        if is_replaced:
            shutil.copytree(run, other, ignore=shutil.ignore_patterns("agents", "checkpoints"))
            (other / "agents").mkdir()
            word = {"pid": 1, "run_id": "other", "host": "h", "boot_id": "b"}
            (other / "launcher.lock").write_text(json.dumps(word))
        arenas = find_arenas(run)
        of_other = read_all(other)
        run.rename(tmp_path / "gone")
        if is_replaced:
            other.rename(run)
        shutil.rmtree(tmp_path / "gone")

        assert process.wait(LIMIT_S) == 1
        said = console.read_text()
        assert f"exit status 1: the run's folder {run} was removed, renamed or replaced" in said
        assert "make room" not in said
        saved = said.partition("newest of step ")[2].partition(" ")[0]
        assert int(saved) > 20, said
        assert (f"the store lacks step {saved}" in said) != is_replaced
        assert [each.exists() for each in arenas] == [True, True], said
        assert run.exists() == is_replaced, "nothing of it was made anew"
        assert read_all(run) == of_other
    finally:
        process.kill()
        process.wait()
        for arena in arenas:
            remove_arena(arena)
