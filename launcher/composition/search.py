"""Teach Hydra where recipes are: a config source and an entry in its search path.

Hydra names a group by its folder, so that `recipe=llama/x` would need a folder
`recipe`. RecipeSource serves the group `recipe` from any folder of recipes
instead: ours, a team's, or the one that a recipe given by path lies in.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import ClassVar

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from launcher.composition.choice import list_recipes
from launcher.composition.frozen import File, Frozen
from launcher.composition.recipe_file import GROUP, read_recipe
from launcher.composition.yaml_size import check_yaml, keep_texts, naming_file, read_yaml_text
from launcher.errors import RecipeError
from launcher.hydra_words import check_hydra_words
from launcher.paths import shipped_folder
from launcher.secrets import check_secrets


class Loaded:
    """The files that Hydra has loaded since `record`, for a recipe that is frozen."""

    files: ClassVar[dict[str, File] | None] = None

    @classmethod
    @contextmanager
    def record(cls) -> Iterator[dict[str, File]]:
        """Yield what is loaded within the block: by its path below conf/, without .yaml."""
        before, cls.files = cls.files, {}
        try:
            yield cls.files
        finally:
            cls.files = before

    @classmethod
    def note(cls, config_path: str, result: ConfigResult) -> ConfigResult:
        """Keep a file as it is before Hydra takes its defaults list out of it."""
        if cls.files is not None:
            content = OmegaConf.to_container(result.config, resolve=False)
            assert isinstance(content, dict)
            name = config_path.removesuffix(".yaml")
            package = (result.header or {}).get("package")
            plain = {str(key): value for key, value in content.items()}
            cls.files[name] = File(content=plain, package=package)
        return result


class FrozenSource(ConfigSource):
    """Serves the files of a frozen recipe, which has precedence over all others."""

    frozen: ClassVar[Frozen | None] = None

    @classmethod
    def take(cls, frozen: Frozen | None) -> None:
        """Serve another recipe, or none."""
        cls.frozen = frozen

    @staticmethod
    def scheme() -> str:
        """Return what stands before :// in the search path."""
        return "frozen"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return one file. Raises ConfigLoadError."""
        file = self._find(config_path)
        if file is None:
            raise ConfigLoadError(f"no {config_path} in the frozen recipe")
        found = ConfigResult(
            config=OmegaConf.create(dict(file.content)),
            path=self.full_path(),
            provider=self.provider,
            header={"package": file.package},
        )
        return Loaded.note(config_path, found)

    def available(self) -> bool:
        """Return whether there is a frozen recipe."""
        return self.frozen is not None

    def is_group(self, config_path: str) -> bool:
        """Return whether a file lies below the path."""
        files = self.frozen.files if self.frozen else ()
        return any(name.startswith(f"{config_path}/") for name in files)

    def is_config(self, config_path: str) -> bool:
        """Return whether the path names a file."""
        return self._find(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Offer nothing: the live options can be chosen, and completed, as ever."""
        return []

    def _find(self, config_path: str) -> File | None:
        name = config_path.removesuffix(".yaml")
        return self.frozen.files.get(name) if self.frozen else None


class GroupSource(FileConfigSource):
    """Hydra's own source of folders, which reads no file that is too large."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file. Raises RecipeError and ConfigLoadError."""
        path = Path(self.path, self._normalize_file_name(config_path))
        if posixpath.normpath(config_path).startswith("../"):
            raise RecipeError(f"{config_path} leads out of the folder of groups, {self.path}")
        text = read_yaml_text(path) if path.is_file() else ""
        with naming_file(path):
            found = super().load_config(config_path)
        place = _place(found, config_path)
        keep_texts(found.config, text, place)
        check_secrets(OmegaConf.to_container(found.config, resolve=False), path, text, place)
        # What our own root tells Hydra is ours.
        if path != shipped_folder() / "conf" / "launcher.yaml":
            check_hydra_words(found.config, path, text, config_path)
        return Loaded.note(config_path, found)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the options and groups below a group; `_` begins the name of a part of them."""
        names = super().list(config_path, results_filter)
        return [name for name in names if not name.startswith("_")]


def _place(found: ConfigResult, config_path: str) -> tuple[str, ...]:
    """Return the section that the keys of a group's file lie in."""
    package = (found.header or {}).get("package") or config_path.rpartition("/")[0]
    return () if package == "_global_" else tuple(re.findall(r"[^./]+", package))


class PackageSource(ImportlibResourcesConfigSource):
    """Hydra's own source of Python packages, which reads no file that is too large."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file. Raises RecipeError and ConfigLoadError."""
        # Hydra's own, a dozen at each start.
        if self.path == "hydra.conf":
            return super().load_config(config_path)
        file = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        name = f"{self.full_path()}/{self._normalize_file_name(config_path)}"
        text = file.read_text("utf-8") if file.is_file() else ""
        check_yaml(text, name)
        with naming_file(name):
            found = super().load_config(config_path)
        keep_texts(found.config, text, _place(found, config_path))
        check_hydra_words(found.config, name, text, config_path)
        return found


class RecipeSource(ConfigSource):
    """Serves `recipe/<family>/<name>` from `<folder>/<family>/<name>.yaml`."""

    @staticmethod
    def scheme() -> str:
        """Return what stands before :// in the search path."""
        return "recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one recipe. Raises RecipeError and ConfigLoadError."""
        path = self._locate(self._normalize_file_name(config_path))
        if path is None or not path.is_file():
            raise ConfigLoadError(f"no recipe at {config_path}")
        name = path.relative_to(self.path).with_suffix("").as_posix()
        header, content = read_recipe(path, name, LauncherSearchPath.recipes)
        found = ConfigResult(
            config=content,
            path=self.full_path(),
            provider=self.provider,
            header=self._get_header_dict(header),
        )
        return Loaded.note(config_path, found)

    def available(self) -> bool:
        """Return whether the folder is there."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Return whether the path is the group of recipes or a family in it."""
        folder = self._locate(config_path)
        return config_path == "" or (folder is not None and folder.is_dir())

    def is_config(self, config_path: str) -> bool:
        """Return whether the path names a recipe."""
        path = self._locate(self._normalize_file_name(config_path))
        return path is not None and path.is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the one group at the root, and in it whole names of recipes, sorted.

        Families are no groups of their own here, so that a shell completes recipe=FAMILY/NAME.
        """
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else [GROUP]
        is_asked = config_path == GROUP and results_filter != ObjectType.GROUP
        return list_recipes([Path(self.path)]) if is_asked else []

    def _locate(self, config_path: str) -> Path | None:
        """Return the path below our folder, or None where it is none of ours."""
        first, _, rest = config_path.partition("/")
        return Path(self.path, rest) if first == GROUP and ".." not in rest.split("/") else None


class LauncherSearchPath(SearchPathPlugin):
    """Adds the folders that `add_search_path` was told last."""

    conf: ClassVar[Sequence[Path]] = ()
    recipes: ClassVar[Sequence[Path]] = ()

    @classmethod
    def take_folders(cls, conf: Sequence[Path], recipes: Sequence[Path]) -> None:
        """Keep the folders for every instance: Hydra makes them itself."""
        cls.conf, cls.recipes = conf, recipes

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Put a team's groups before ours, and recipes behind."""
        main = SearchPathQuery(provider="main")
        for path in self.conf:
            search_path.prepend(provider="launcher", path=f"file://{path}", anchor=main)
        for path in self.recipes:
            search_path.append(provider="launcher", path=f"recipes://{path}")
        if frozen := FrozenSource.frozen:
            place = f"frozen://{frozen.name}@{frozen.version}"
            search_path.prepend(provider="launcher", path=place)


def add_search_path(
    conf: Sequence[Path], recipes: Sequence[Path], frozen: Frozen | None = None
) -> None:
    """Make Hydra look into the folders from now on; a frozen recipe first, then in their order."""
    FrozenSource.take(frozen)
    LauncherSearchPath.take_folders(conf, recipes)
    plugins = Plugins.instance()
    if LauncherSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(RecipeSource)
        plugins.register(FrozenSource)
        plugins.register(LauncherSearchPath)
        # No public call puts a source in the place of one of Hydra's own.
        for source in (GroupSource, PackageSource):
            SourcesRegistry.instance().types[source.scheme()] = source
