"""Whole rendered texts of every shipped recipe for every kind of cluster.

`pytest --update-golden` writes them again; the change is reviewed as a diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.command import launch
from tests.launcher.shipped import ASKED_FOR, CLUSTERS, RECIPES, rendered, shipped_job

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rendered_texts_are_the_reviewed_ones(
    recipe: str, cluster: str, update_golden: bool
) -> None:
    folder = GOLDEN / recipe / cluster
    files = rendered(shipped_job(recipe, cluster))
    if update_golden:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        for name, text in files.items():
            (folder / name).write_text(text)

    reviewed = {path.name: path.read_text() for path in folder.iterdir()}

    assert files == reviewed


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_process_in_another_folder_writes_the_same_bytes(tmp_path: Path, cluster: str) -> None:
    recipe = "llama/llama3_70b_pretrain_checkpointless"
    folder = tmp_path / "some where"
    folder.mkdir()

    ended = launch(f"recipe={recipe}", *CLUSTERS[cluster], *ASKED_FOR[recipe],
                   f"run.dir={tmp_path}/out/dir", folder=folder,
                   env={"PYTHONHASHSEED": "7", "USER": "nobody", "HOME": "/", "TZ": "Asia/Tokyo",
                        "HOSTNAME": "elsewhere"})  # fmt: skip

    assert ended.status == 0, ended.err
    written = {path.name: path.read_bytes() for path in (tmp_path / "out/dir").iterdir()}
    golden = {path.name: path.read_bytes() for path in (GOLDEN / recipe / cluster).iterdir()}
    assert written == golden
    assert list(folder.iterdir()) == []


def test_golden_files_are_those_of_shipped_recipes() -> None:
    kept = {path.parent.parent.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("job.json")}

    assert kept == set(RECIPES)
