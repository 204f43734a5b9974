"""A kept file that somebody has rewritten, with a sum that fits what it holds now."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.composition.frozen import ROOT_FILE, Frozen, frozen_text, read_frozen
from launcher.versions.folder import find_unfit, write_frozen
from launcher.versions.lock import Version
from launcher.versions.resolved import resolve_recipe
from tests.launcher.command import launch, put

MINE = """\
# @package _global_
defaults: [llama/llama3_tiny_pretrain, _self_]
recipe: {name: mine, version: 1}
"""


def rewritten(frozen: Frozen, added: dict[str, Any]) -> Frozen:
    """Return a version with further content, and the digest that it had."""
    root = frozen.files[ROOT_FILE]
    files = {**frozen.files, ROOT_FILE: replace(root, content={**root.content, **added})}
    return replace(frozen, files=files)


@pytest.fixture(scope="module")
def kept() -> Frozen:
    return resolve_recipe("llama/llama3_tiny_pretrain").frozen


@pytest.mark.parametrize(
    "added",
    [
        pytest.param({"env": {"LD_PRELOAD": "/tmp/evil.so:${run.name}"}}, id="part-reference"),
        pytest.param({"model": {"weights": "/tmp/evil/${cluster.kind}"}}, id="of-the-cluster"),
        pytest.param(
            {"hydra": {"mode": "MULTIRUN", "sweeper": {"params": {"trainer.optimizer.lr": 0.5}}}},
            id="sweep",
        ),
        pytest.param({"run": {"name": "evil"}}, id="run"),
        pytest.param({"plan": {"force": True}}, id="plan"),
    ],
)
def test_lock_names_all_content_of_a_kept_file(
    tmp_path: Path, kept: Frozen, added: dict[str, Any]
) -> None:
    """Also what does not count for the digest."""
    version = Version(
        version=kept.version,
        digest=kept.digest,
        content=kept.content_sum(),
        schema=1,
        date=datetime.date(2026, 3, 1),
        change="why",
    )
    write_frozen(tmp_path, kept)
    assert find_unfit(tmp_path, kept.name, version) is None

    write_frozen(tmp_path, rewritten(kept, added))

    problem = find_unfit(tmp_path, kept.name, version) or ""
    assert f"and recipes.lock names {version.content[:12]}; get the file back" in problem
    older = replace(version, content="")
    assert find_unfit(tmp_path, kept.name, older) is None, "a line of before has the digest alone"


def test_frozen_file_that_was_rewritten_with_its_sum_is_named_and_not_used(tmp_path: Path) -> None:
    """A file's own head proves nothing: the lock says what it has to resolve to."""
    put(tmp_path / "recipes/mine.yaml", MINE)
    assert launch("check", "--update", "-m", "as it began", folder=tmp_path).status == 0
    name, path = "mine@1", tmp_path / "recipes/.versions/mine@1.yaml"
    frozen = read_frozen(path)
    path.write_text(frozen_text(rewritten(frozen, {"env": {"RATE": "rewritten"}})))
    assert read_frozen(path).digest == frozen.digest
    assert f"{path} has the content " in launch(f"recipe={name}", folder=tmp_path).err
    lock = tmp_path / "recipes/recipes.lock"
    lock.write_text(re.sub(r" content: \w+,", "", lock.read_text()))

    found, used = launch("check", folder=tmp_path), launch(f"recipe={name}", folder=tmp_path)

    for said in (found.out + found.err, used.err):
        assert f"{path} resolves to the digest " in said
        assert f", and the lock names {frozen.digest[:12]}; get the file back" in said
    assert (found.status, used.status) == (1, 2)
    assert f"recipe '{name}' cannot be used: " in used.err
    for words in (["show", name], ["plan", f"recipe={name}"], ["explain", f"recipe={name}"]):
        assert "resolves to the digest" in launch(*words, folder=tmp_path).err, words

    (tmp_path / "recipes/mine.yaml").unlink()
    found = launch("check", folder=tmp_path)
    assert (found.status, found.err.splitlines()[0].partition(": ")[0]) == (1, "mine")
    assert f"{path} resolves to the digest " in found.err


def test_change_beside_a_reference_to_the_run_raises_the_version(tmp_path: Path) -> None:
    """Also where the lock's lines are of a launcher that kept the digest alone."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    path, lock = recipes / "mine.yaml", recipes / "recipes.lock"
    path.write_text(MINE + 'env: {FLAGS: "--scale=1 ${run.name}"}\n')
    assert launch("check", "--update", "-m", "flags", folder=tmp_path).status == 0
    lock.write_text(re.sub(r" content: \w+,", "", lock.read_text()))
    text = (recipes / ".versions/mine@1.yaml").read_text()
    path.write_text(path.read_text().replace("--scale=1 ", "--scale=100 "))

    assert launch("check", folder=tmp_path).err == (
        "mine: is not what version 1 was; `check --update -m WHY` raises its version\n"
        '  env.FLAGS: "--scale=1 ${run.name}" -> "--scale=100 ${run.name}"\n'
    )
    ended = launch("check", "--update", "-m", "why", folder=tmp_path)
    assert ended.out.startswith("mine is version 2 now\n")
    assert (recipes / ".versions/mine@1.yaml").read_text() == text
