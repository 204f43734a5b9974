"""Hold a job's instance against the table it was chosen from.

The files of the group `instance` are that table, ours and a team's: a type that
has no file is a mistyped one, and a number that differs is a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from launcher.composition.choice import nearest
from launcher.composition.yaml_size import naming_file, read_yaml_text
from launcher.errors import RecipeError
from launcher.job.workload import Instance


def check_instance(instance: Instance, conf: Iterable[Path]) -> None:
    """Raise RecipeError where no file in `conf`/instance says the same of this type."""
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
        table = yaml.safe_load(read_yaml_text(path))
    for key, value in instance.model_dump().items():
        if key in table and table[key] != value:
            raise RecipeError(
                f"instance.{key} {value!r} is not that of {instance.type!r}, {table[key]!r}; "
                "choose with instance=NAME, and for another machine add conf/instance/<type>.yaml"
            )
