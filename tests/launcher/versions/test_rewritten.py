"""A kept file that somebody has rewritten, with a sum that fits what it holds now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.composition.frozen import ROOT_FILE, frozen_text, read_frozen
from tests.launcher.command import launch

MINE = """\
# @package _global_
defaults: [llama/llama3_tiny_pretrain, _self_]
recipe: {name: mine, version: 1}
"""


def test_frozen_file_that_was_rewritten_with_its_sum_is_named_and_not_used(tmp_path: Path) -> None:
    """A file's own head proves nothing: the lock says what it has to resolve to."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text(MINE)
    assert launch("check", "--update", "-m", "as it began", folder=tmp_path).status == 0
    name, path = "mine@1", tmp_path / "recipes/.versions/mine@1.yaml"
    frozen = read_frozen(path)
    root = frozen.files[ROOT_FILE]
    content = {**root.content, "env": {"RATE": "rewritten"}}
    files = {**frozen.files, ROOT_FILE: replace(root, content=content)}
    path.write_text(frozen_text(replace(frozen, files=files)))
    assert read_frozen(path).digest == frozen.digest

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
