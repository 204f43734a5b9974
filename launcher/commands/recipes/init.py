"""The command `init`: what a team's repository begins with."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.composition.choice import nearest
from launcher.errors import RecipeError
from launcher.paths import find_folders, shipped_folder

_SLURM = """\
# What every job on our cluster needs; choose it with cluster=ours. Each line of a # is a key that
# may be set: `launcher show NAME cluster=ours` shows them all.
defaults:
  - slurm
  - _self_

# account: llm
# partition: train
# container: {image: /fsx/images/train.sqsh, mounts: ['/fsx:/fsx'], mount_home: false}
# checkpoint_store_url: folder:/fsx/checkpoints
"""
_K8S = """\
# What every job on our cluster needs; choose it with cluster=ours. Each line of a # is a key that
# may be set: `launcher show NAME cluster=ours` shows them all.
defaults:
  - k8s
  - _self_

# namespace: research
# queue: research
# image: registry.example/training-recipes:0.1.0
# volume_claims: [{claim_name: fsx, mount_path: /fsx}]
# run_path: /fsx/runs
# checkpoint_store_url: folder:/fsx/checkpoints
"""
_RECIPE = """\
# @package _global_
defaults:
  - llama/llama3_tiny_pretrain    # another recipe, as a beginning: `launcher list` shows them
  - _self_                        # then this file

recipe:
  name: ours/first
  version: 1
  schema: 1
  description: A small model on this machine, to begin with

trainer:
  max_steps: 20
"""
_HOOK = """\
# Says which recipes are not what their versions are; `pre-commit install` has git run it.
repos:
  - repo: local
    hooks:
      - id: recipes
        name: recipes are what their versions say
        entry: launcher check
        language: system
        pass_filenames: false
        files: ^(conf|recipes)/
"""
_PROFILES = {"slurm": _SLURM, "k8s": _K8S}
_KIND = re.compile(r"^ *- (slurm|k8s|local)$", re.MULTILINE)


def print_init(arguments: Sequence[str], start: Path) -> int:
    """Write a team's first files into the folder `start`, and leave those that are there.

    Raises RecipeError and OSError.
    """
    kind = arguments[0] if arguments else "slurm"
    if len(arguments) > 1:
        raise RecipeError(f"init takes one kind of cluster, not {' and '.join(arguments)}")
    if kind not in _PROFILES:
        raise RecipeError(f"init takes a kind of cluster, not {kind!r}; {nearest(kind, _PROFILES)}")
    found, here = find_folders(start), (start.resolve(), shipped_folder())
    if above := [each for each in (*found.conf, *found.recipes) if each.parent not in here]:
        raise RecipeError(
            f"{above[0]} is your repository's, and files here would hide its own; run init in "
            f"{above[0].parent}"
        )
    files = {
        "conf/cluster/ours.yaml": _PROFILES[kind],
        "recipes/ours/first.yaml": _RECIPE,
        ".pre-commit-config.yaml": _HOOK,
    }
    for name, text in files.items():
        path = start / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = _write_new(path, text)
        there = "" if is_new or not path.is_file() else path.read_text("utf-8", "replace")
        found_kind = _KIND.search(there)
        of_kind = f", for {found_kind[1]}" if found_kind else ""
        sys.stdout.write(f"{'wrote' if is_new else 'left as it is:'} {name}{of_kind}\n")
    sys.stdout.write("next: launcher check --update -m 'as it begins'\n")
    return 0


def _write_new(path: Path, text: str) -> bool:
    """Write a file; returns whether nothing was there before."""
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                # A full disk: half a file would be left as it is by the next call.
                path.unlink()
                raise
    except FileExistsError:
        return False
    return True
