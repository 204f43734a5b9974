"""A recipe's version as one file: every file that it was composed of, with what was in it then.

The options of groups are kept beside what the recipe sets over them, so that another option that is
chosen on the command line takes the place of a frozen one, as it does in the live recipe.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from launcher import SCHEMA_VERSION, VERSION
from launcher.composition.references import foreign_resolvers
from launcher.composition.yaml_size import naming_file, read_yaml_text
from launcher.errors import RecipeError
from launcher.hydra_words import HYDRA, check_hydra_words
from launcher.secrets import check_secrets
from launcher.written.overrides import keep_text
from launcher.written.scalars import find_scalars
from launcher.written.texts import to_text
from resilience.plain_files import open_plain

VERSIONS_FOLDER = ".versions"
"""In each folder of recipes: the versions of these, a file each."""
ROOT = "_frozen"
"""The recipe's name among its files, and while it is composed: none that can be chosen has it."""
ROOT_FILE = f"recipe/{ROOT}"
BESIDE = ("action", "cluster", "hydra", "oversubscribe", "plan", "run")
"""Keys that say how and where a recipe is run, and nothing of what it trains."""
_HEAD = re.compile(
    r"# frozen (?P<name>[a-z0-9_/]+)@(?P<version>[1-9]\d*) (?P<digest>[0-9a-f]{64})"
    r"(\n# content (?P<sum>[0-9a-f]{64}))?(\n# launcher (?P<launcher>\S+))?"
)
_KEYS = ("overrides", "files")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a composition: what it holds, and the package that its head names."""

    content: Mapping[str, Any]
    package: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A version of a recipe, or that with overrides."""

    name: str
    version: int
    digest: str
    """Of the recipe that it resolves to, its overrides among it."""
    files: Mapping[str, File]
    """By the path below conf/, without .yaml; recipes lie below recipe/, its own at ROOT_FILE."""
    overrides: tuple[str, ...] = ()
    """What was overridden when it was frozen, in order."""
    written_sum: str = ""
    """Of its content, as the file's second line has it; empty where there is none."""
    launcher: str = field(default=VERSION, compare=False)
    """The version of the launcher that froze it; empty where the file does not say."""
    path: Path | None = field(default=None, compare=False)
    """The file that it was read from."""

    def content_sum(self) -> str:
        """Return the SHA-256 of its overrides and files, without the recipes' descriptions."""
        files = {
            name: [each.package, _undescribed(each.content)] for name, each in self.files.items()
        }
        text = canonical_json([self.overrides, files])
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def canonical_json(node: object) -> str:
    """Return plain data as the one JSON text that it has."""
    return json.dumps(_with_text_keys(node), sort_keys=True, separators=(",", ":"), default=repr)


def _with_text_keys(node: object) -> object:
    if isinstance(node, Mapping):
        return {str(key): _with_text_keys(value) for key, value in node.items()}
    return [_with_text_keys(each) for each in node] if isinstance(node, (list, tuple)) else node


def _undescribed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    recipe = content.get("recipe")
    if not isinstance(recipe, Mapping):
        return content
    kept = {key: value for key, value in recipe.items() if key != "description"}
    return {**content, "recipe": kept}


def frozen_path(folder: Path, name: str, version: int) -> Path:
    """Return where a version of a recipe of this folder of recipes lies."""
    return folder / VERSIONS_FOLDER / f"{name}@{version}.yaml"


def frozen_versions(name: str, folders: Iterable[Path]) -> list[int]:
    """Return the versions of a recipe that are kept in the folders, in order."""
    found = set()
    for folder in folders:
        beside = frozen_path(folder, name, 1)
        for path in beside.parent.glob("*@*.yaml") if beside.parent.is_dir() else ():
            stem, _, number = path.stem.rpartition("@")
            if stem == beside.stem.rpartition("@")[0] and re.fullmatch(r"[1-9]\d*", number):
                found.add(int(number))
    return sorted(found)


def is_frozen(path: Path) -> bool:
    """Return whether a recipe's file is one that was frozen."""
    return _first_lines(path).startswith("# frozen ")


def read_sum(path: Path) -> str | None:
    """Return what a frozen recipe's file says of its content, None where that says nothing."""
    return head["sum"] if (head := _HEAD.match(_first_lines(path))) else None


def _first_lines(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_plain) as file:
            return "".join(file.readline(1000) for _ in range(2))
    except OSError:
        return ""


def frozen_text(frozen: Frozen) -> str:
    """Return the text of a frozen recipe's file."""
    files = {
        name: {**({"package": f.package} if f.package else {}), "content": f.content}
        for name, f in sorted(frozen.files.items())
    }
    body = OmegaConf.to_yaml(
        OmegaConf.create({"overrides": list(frozen.overrides), "files": files})
    )
    head = f"# frozen {frozen.name}@{frozen.version} {frozen.digest}\n"
    launcher = f"# launcher {frozen.launcher}\n" if frozen.launcher else ""
    return f"{head}# content {frozen.content_sum()}\n{launcher}{body}"


def read_frozen(path: Path) -> Frozen:
    """Read a frozen recipe's file. Raises RecipeError that names the file and what is wrong."""
    text = read_yaml_text(path)
    head = _HEAD.match(text)
    if head is None:
        raise RecipeError(f"{path} does not begin with '# frozen NAME@VERSION DIGEST'")
    with naming_file(path):
        for scalar in find_scalars(text):
            # As it was frozen a number is one; text that looks like one is in quotes.
            if (
                scalar.is_changed_text
                and yaml.safe_dump(scalar.value).split("\n")[0] != scalar.text
            ):
                where = ".".join(map(str, scalar.place))
                raise RecipeError(
                    f"{path}, line {scalar.line}: {where} {scalar.text} would be read as "
                    f"{to_text(scalar.value)}; write '{scalar.text}' in quotes"
                )
        body = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    check_secrets(body, path, text)
    if not isinstance(body, dict) or set(body) != set(_KEYS):
        raise RecipeError(f"{path}: allowed are the keys {' and '.join(_KEYS)}, both")
    overrides, files = body["overrides"], body["files"]
    if not isinstance(overrides, list) or not all(map(_may_be_frozen, overrides)):
        raise RecipeError(f"{path}: overrides: allowed: a list of KEY=VALUE")
    frozen = Frozen(
        name=head["name"],
        version=int(head["version"]),
        digest=head["digest"],
        files=dict(_read_files(files, path, text)),
        overrides=tuple(map(keep_text, overrides)),
        written_sum=head["sum"] or "",
        launcher=head["launcher"] or "",
        path=path,
    )
    _check_schema(frozen, path)
    if frozen.written_sum not in ("", frozen.content_sum()):
        raise RecipeError(
            f"{path} was changed since it was frozen; to use it so, copy it without its line "
            "'# content', and choose the copy as recipe=FILE.yaml"
        )
    if ROOT_FILE not in frozen.files:
        raise RecipeError(f"{path}: files has no {ROOT_FILE}, which is the recipe's own")
    return frozen


def _check_schema(frozen: Frozen, path: Path) -> None:
    """Raise RecipeError where a newer launcher has frozen what this one does not know."""
    root = frozen.files[ROOT_FILE].content if ROOT_FILE in frozen.files else {}
    info = root.get("recipe")
    schema = info.get("schema") if isinstance(info, Mapping) else None
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        newer = f"launcher {frozen.launcher}" if frozen.launcher else "a newer launcher"
        raise RecipeError(
            f"{path}: recipe.schema {schema}; allowed: {SCHEMA_VERSION}, the newest that launcher "
            f"{VERSION} knows; {newer} knows it"
        )


def _may_be_frozen(word: object) -> bool:
    """Return whether a word may be among what a recipe was frozen with."""
    if not isinstance(word, str) or not re.match(r"(\+\+?|~)?[\w/]", word):
        return False
    key = word.partition("=")[0].lstrip("+~")
    is_beside = key == "recipe" or HYDRA in key or says_how_it_is_run(word)
    return not (is_beside or any(foreign_resolvers(word)))


def says_how_it_is_run(override: str) -> bool:
    """Return whether an override says nothing of the recipe itself."""
    return re.split(r"[.=/@]", override.lstrip("+~"), maxsplit=1)[0] in BESIDE


def _read_files(files: object, path: Path, text: str) -> Iterator[tuple[str, File]]:
    if not isinstance(files, dict):
        raise RecipeError(f"{path}: files: allowed: a mapping of paths to what they hold")
    for name, entry in files.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), dict):
            raise RecipeError(f"{path}: files.{name}: allowed: a mapping with content")
        group, slash, _ = str(name).partition("/")
        package = entry.get("package")
        if not slash or group in BESIDE or HYDRA in str(package):
            where = f" in package {package}" if package else ""
            raise RecipeError(f"{path}: files.{name}{where}: allowed: a recipe, or a group of it")
        check_hydra_words(entry["content"], path, text, place=("files", str(name), "content"))
        yield str(name), File(content=entry["content"], package=package)


def frozen_arguments(frozen: Frozen, given: Sequence[str]) -> list[str]:
    """Return the overrides of a frozen recipe, without options that `given` chooses anew."""
    chosen = {word.partition("=")[0] for word in given if re.match(r"[\w/]+=", word)}
    return [word for word in frozen.overrides if word.partition("=")[0] not in chosen]
