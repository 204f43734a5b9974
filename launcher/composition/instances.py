"""Hold a job's instance against the table it was chosen from.

The files of the group `instance` are that table, ours and a team's: a type that
has no file is a mistyped one, and a number that differs is a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.composition.choice import nearest
from launcher.composition.frozen import Frozen
from launcher.composition.yaml_size import naming_file, read_yaml_text
from launcher.errors import RecipeError
from launcher.job.workload import Instance


def check_instance(instance: Instance, conf: Iterable[Path], frozen: Frozen | None = None) -> None:
    """Raise RecipeError where no file in `conf`/instance says the same of this type.

    A frozen recipe brings the file of its own instance.
    """
    if frozen and (kept := frozen.files.get(f"instance/{instance.type}")):
        _check_table(instance, kept.content)
        return
    folders = [folder / "instance" for folder in conf]
    path = next(
        (p for folder in folders if (p := folder / f"{instance.type}.yaml").is_file()), None
    )
    if path is None:
        known = {file.stem for folder in folders for file in folder.glob("*.yaml")}
        raise RecipeError(
            f"instance.type {instance.type!r} is no known instance; "
            f"{nearest(instance.type, known)}; for another add conf/instance/<type>.yaml"
        )
    with naming_file(path):
        _check_table(instance, yaml.safe_load(read_yaml_text(path)))


def _check_table(instance: Instance, table: Mapping[str, Any]) -> None:
    for key, value in instance.model_dump().items():
        if key in table and table[key] != value:
            raise RecipeError(
                f"instance.{key} {value!r} is not that of {instance.type!r}, {table[key]!r}; "
                "choose with instance=NAME, and for another machine add conf/instance/<type>.yaml"
            )
