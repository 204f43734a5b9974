"""Names that recipes had before they were renamed.

A folder of recipes says them in `_aliases.yaml`, a mapping of each old name to the new one. A file
that has the old name by now comes before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import RecipeError

ALIASES_FILE = "_aliases.yaml"


def find_renamed(name: str, folders: Sequence[Path]) -> str | None:
    """Return the name that a recipe has now; None where nobody says that it was renamed.

    Raises RecipeError that names the file where its words are no aliases, go round in a ring, or
    lead to no recipe.
    """
    seen = [name]
    while (found := _find_entry(seen[-1], folders)) is not None:
        path, new = found
        if new in seen:
            raise RecipeError(f"{path}: {' -> '.join([*seen, new])}: a ring of renamed recipes")
        seen.append(new)
        if any((folder / f"{new}.yaml").is_file() for folder in folders):
            return new
    if len(seen) > 1:
        raise RecipeError(
            f"{path}: {seen[-2]!r} is {seen[-1]!r} there, and no recipe has this name"
        )
    return None


def check_aliases(folder: Path, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield each old name that a folder says in vain, with the reason."""
    path = folder / ALIASES_FILE
    try:
        names = _read_aliases(path) if path.is_file() else {}
    except RecipeError as error:
        yield ALIASES_FILE, str(error)
        return
    for name in names:
        if any((each / f"{name}.yaml").is_file() for each in folders):
            yield name, f"{path}: a recipe has this name by now; remove one of the two"
            continue
        try:
            find_renamed(name, folders)
        except RecipeError as error:
            yield name, str(error)


def _find_entry(name: str, folders: Sequence[Path]) -> tuple[Path, str] | None:
    """Return the file that has a new name for a recipe, and that name."""
    for folder in folders:
        path = folder / ALIASES_FILE
        if path.is_file() and (new := _read_aliases(path).get(name)) is not None:
            return path, new
    return None


def _read_aliases(path: Path) -> dict[str, str]:
    # Few folders have the file, and most command lines need no YAML before Hydra does.
    import yaml

    from launcher.composition.yaml_size import naming_file, read_yaml_text

    text = read_yaml_text(path)
    with naming_file(path):
        content = yaml.safe_load(text)
    if not isinstance(content, dict) or not all(
        isinstance(word, str) for pair in content.items() for word in pair
    ):
        raise RecipeError(f"{path}: allowed: a mapping of old names of recipes to new ones")
    return content
