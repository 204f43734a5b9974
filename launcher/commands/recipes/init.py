"""The command `init`: what a team's repository begins with, or a recipe of a script."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.composition.choice import nearest
from launcher.errors import RecipeError
from launcher.job.script.rules import find_entry_problem
from launcher.paths import find_folders, shipped_folder

_PROFILES = ("slurm", "k8s")
_KIND = re.compile(r"^ *- (slurm|k8s|local)$", re.MULTILINE)


def print_init(arguments: Sequence[str], start: Path) -> int:
    """Write a team's first files into the folder `start`, and leave those that are there.

    Raises RecipeError and OSError.
    """
    if "--script" in arguments:
        return _init_script([each for each in arguments if each != "--script"], start)
    kind = arguments[0] if arguments else "slurm"
    if len(arguments) > 1:
        raise RecipeError(f"init takes one kind of cluster, not {' and '.join(arguments)}")
    if kind not in _PROFILES:
        raise RecipeError(f"init takes a kind of cluster, not {kind!r}; {nearest(kind, _PROFILES)}")
    _check_here(start)
    files = {
        "conf/cluster/ours.yaml": kind,
        "recipes/ours/first.yaml": "recipe",
        ".pre-commit-config.yaml": "pre-commit",
    }
    for name, ours in files.items():
        _write(start, name, _read(ours))
    sys.stdout.write("next: launcher check --update -m 'as it begins'\n")
    return 0


def _init_script(arguments: Sequence[str], start: Path) -> int:
    """Write a recipe of a script into the folder `start`."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise RecipeError("init --script takes one file, as init --script train.py")
    where, script = f"init --script {arguments[0]!r}", (start / arguments[0]).resolve()
    if not script.is_file():
        raise RecipeError(f"{where}: no such file; allowed: a script's file")
    if script.suffix != ".py" and not os.access(script, os.X_OK):
        raise RecipeError(f"{where}: allowed: a Python script, NAME.py, or an executable file")
    _check_here(start)
    folder = start.resolve() if script.is_relative_to(start.resolve()) else script.parent
    entry = str(script.relative_to(folder) if script.suffix == ".py" else script)
    if problem := find_entry_problem(entry):
        raise RecipeError(f"{where}: {problem}")
    name = f"{_as_name(folder.name)}/{_as_name(script.stem)}"
    path, quoted = start / f"recipes/{name}.yaml", json.dumps(entry)
    there = path.read_text("utf-8", "replace") if path.is_file() else quoted
    if quoted not in there and f"entry: {entry}" not in there:
        raise RecipeError(f"{where}: {path} is there, with another entry; rename it, or the script")
    text = _read("script").format(
        name=name,
        description=json.dumps(f"{script.name}, as it is"),
        entry=quoted,
        folder=json.dumps(str(folder)),
    )
    _write(start, f"recipes/{name}.yaml", text)
    sys.stdout.write(f"next: launcher recipe={name} action=run\n")
    return 0


def _read(name: str) -> str:
    """Return the text of a file that we ship for `init`."""
    return (shipped_folder() / "templates" / "init" / f"{name}.yaml").read_text("utf-8")


def _as_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "script"


def _check_here(start: Path) -> None:
    """Raise RecipeError where a folder above has the team's files."""
    found, here = find_folders(start), (start.resolve(), shipped_folder())
    if above := [each for each in (*found.conf, *found.recipes) if each.parent not in here]:
        raise RecipeError(
            f"{above[0]} is your repository's, and files here would hide its own; run init in "
            f"{above[0].parent}"
        )


def _write(start: Path, name: str, text: str) -> None:
    """Write a file and say so, or that it is there."""
    path = start / name
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = _write_new(path, text)
    kind = not is_new and path.is_file() and _KIND.search(path.read_text("utf-8", "replace"))
    of_kind = f", for {kind[1]}" if kind else ""
    sys.stdout.write(f"{'wrote' if is_new else 'left as it is:'} {name}{of_kind}\n")


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
