"""The files and overrides that Hydra composes a config from, in the order in which it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from launcher.composition.recipe_file import GROUP
from launcher.composition.search import FrozenSource
from launcher.composition.yaml_size import read_yaml_text
from launcher.hydra_words import HYDRA
from launcher.paths import readable_path
from launcher.provenance.fold import FileLayer, Origin, OverrideLayer
from launcher.provenance.lines import Lines, parse_lines
from launcher.provenance.place import is_same
from launcher.secrets import NOT_SHOWN, masked, shown_override


def read_layers(
    config_name: str, overrides: Sequence[str], start: Path
) -> list[FileLayer | OverrideLayer]:
    """Return what the config of these overrides is composed of, the lowest first.

    Hydra has to be initialized, and to have composed the same before: nothing is checked here.
    Files are named as they are seen from the folder `start`.
    """
    loader = cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader())
    # The public call gives the list alone, and the files would have to be read once more.
    parsed, files = loader._parse_overrides_and_create_caching_repo(  # noqa: SLF001
        config_name, list(overrides)
    )
    found = create_defaults_list(
        repo=files, config_name=config_name, overrides_list=parsed, prepend_hydra=True,
        skip_missing=False,
    )  # fmt: skip
    chosen = _Choices(parsed, found.defaults)
    layers: list[FileLayer | OverrideLayer] = []
    for default in found.defaults:
        loaded = files.load_config(default.config_path or "")
        package = _package(default, loaded)
        if loaded is not None and package[:1] != [HYDRA]:
            layers.append(_file_layer(loaded, package, default, chosen, start))
    return [*layers, *_override_layers(found.config_overrides, start)]


class _Choices:
    """Which override of the command line has chosen a group's file, by itself or by inclusion."""

    def __init__(self, overrides: Sequence[Override], defaults: Sequence[ResultDefault]) -> None:
        self._chosen = {
            f"{each.key_or_group}/{each.value()}": each.input_line
            for each in overrides
            if each.key_or_group != GROUP and not each.is_delete()
        }
        self._including = {each.config_path: each.parent for each in defaults}

    def of(self, config_path: str | None) -> str | None:
        """Return the override as a message may show it, None where none has chosen the file."""
        seen: set[str | None] = set()
        while config_path is not None and config_path not in seen:
            seen.add(config_path)
            if override := self._chosen.get(config_path):
                return shown_override(override)
            config_path = self._including.get(config_path)
        return None


def _package(default: ResultDefault, loaded: ConfigResult | None) -> list[str]:
    header = (loaded and loaded.header["package"]) or ""
    package = header if default.package is None else default.package
    return package.split(".") if package else []


def _file_layer(
    loaded: ConfigResult, package: list[str], default: ResultDefault, chosen: _Choices, start: Path
) -> FileLayer:
    name = default.config_path or ""
    path = _path_of(loaded, name)
    origin = Origin(
        file=f"{loaded.path}/{name}.yaml" if path is None else readable_path(path, start),
        path=None if path is None else str(path),
        override=chosen.of(name),
        is_recipe=name.startswith(f"{GROUP}/"),
    )
    lines = Lines() if path is None else parse_lines(read_yaml_text(path))
    content: Any = OmegaConf.to_container(loaded.config, resolve=False)
    for section in reversed(package):
        content = {section: content}
    content.pop(HYDRA, None)
    return FileLayer(content, lines.embedded_in(package), origin)


def _path_of(loaded: ConfigResult, name: str) -> Path | None:
    """Return the file that a config was read from, None where that is none, as in a zipped package.

    It is named as Hydra finds it, so that a link keeps its own name.
    """
    scheme, _, folder = loaded.path.partition("://")
    if scheme == "pkg":
        found = resources.files(folder).joinpath(f"{name}.yaml")
        return found if isinstance(found, Path) else None
    if scheme == "recipes":
        name = name.removeprefix(f"{GROUP}/")
    return Path(folder, f"{name}.yaml").absolute() if scheme in {"recipes", "file"} else None


def _override_layers(overrides: Sequence[Override], start: Path) -> Iterator[OverrideLayer]:
    frozen = FrozenSource.frozen
    # They come before those of the command line.
    of_file = list(frozen.overrides) if frozen else []
    for each in overrides:
        place = tuple(each.key_or_group.split("."))
        if place[0] == HYDRA:
            continue
        value = _plain(each.value())
        text = each.input_line or each.key_or_group
        is_shown = is_same(masked(value, place), value)
        origin = Origin(override=text if is_shown else f"{text.partition('=')[0]}={NOT_SHOWN}")
        if frozen and frozen.path and text in of_file:
            of_file.remove(text)
            name = readable_path(frozen.path, start)
            origin = replace(origin, file=name, path=str(frozen.path), is_recipe=True)
        yield OverrideLayer(place, value, origin, is_deletion=each.is_delete())


def _plain(value: Any) -> Any:
    """Return an override's value as OmegaConf keeps it."""
    if isinstance(value, (dict, list)):
        return OmegaConf.to_container(OmegaConf.create(value), resolve=False)
    return value
