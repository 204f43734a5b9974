"""Rendered texts of each shipped recipe, for each kind of cluster, are the reviewed ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.launcher.command import launch
from tests.launcher.golden import (
    ROOT,
    differences,
    digest,
    is_whole,
    parse_digests,
    read_digests,
    read_whole,
    texts_at,
    texts_of,
)
from tests.launcher.shipped import ASKED_FOR, CLUSTERS, RECIPES, rendered, shipped_job


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rendered_texts_are_the_reviewed_ones(recipe: str, cluster: str) -> None:
    texts = texts_of(recipe, cluster)
    whole = {name: text for name, text in texts.items() if is_whole(name)}
    digests = {name: digest(text) for name, text in texts.items() if name not in whole}
    here = f"{recipe}/{cluster}/"

    assert whole == {name: text for name, text in read_whole().items() if name.startswith(here)}
    reviewed = {name: each for name, each in read_digests().items() if name.startswith(here)}
    assert digests == reviewed, "`make golden` shows the difference"


def test_only_texts_of_shipped_recipes_are_kept() -> None:
    kept = [name.rsplit("/", 2) for name in (*read_whole(), *read_digests())]

    assert {recipe for recipe, _, _ in kept} == set(RECIPES)
    assert {cluster for _, cluster, _ in kept} == set(CLUSTERS)


def test_a_change_of_many_texts_is_shown_once() -> None:
    before = {"a": "0\n1\n2\n3\n", "b": "x\n0\n1\n2\n3\n", "c": "1\n", "gone": "x\n"}
    after = {"a": "0\n1\ntwo\n3\n", "b": "x\n0\n1\ntwo\n3\n", "c": "1\n", "new": "y\n"}

    told = differences(before, after)

    assert told.splitlines() == [
        "=== a", "=== b", "@@", " 0", " 1", "-2", "+two", " 3",
        "=== gone", "@@", "-x", "=== new", "@@", "+y",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a checkout without its history")
def test_what_the_last_commit_renders_is_what_its_digests_say() -> None:
    kept = subprocess.run(
        ["git", "show", "HEAD:tests/golden/digests.txt"], capture_output=True, check=True, text=True
    ).stdout

    texts = texts_at("HEAD")

    digests = {name: digest(text) for name, text in texts.items() if not is_whole(name)}
    assert digests == parse_digests(kept)


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
    written = {path.name: path.read_text() for path in (tmp_path / "out/dir").iterdir()}
    assert written == rendered(shipped_job(recipe, cluster))
    assert list(folder.iterdir()) == []
