"""Teach Hydra where recipes are: a config source and an entry in its search path.

Hydra names a group by its folder, so that `recipe=llama/x` would need a folder
`recipe`. RecipeSource serves the group `recipe` from any folder of recipes
instead: ours, a team's, or the one that a recipe given by path lies in.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from launcher.composition.choice import list_recipes
from launcher.composition.recipe_file import GROUP, check_secrets, read_recipe
from launcher.composition.yaml_size import check_yaml_size, naming_file, read_yaml_text


class GroupSource(FileConfigSource):
    """Hydra's own source of folders, which reads no file that is too large."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file. Raises RecipeError and ConfigLoadError."""
        path = Path(self.path, self._normalize_file_name(config_path))
        text = read_yaml_text(path) if path.is_file() else ""
        with naming_file(path):
            found = super().load_config(config_path)
        check_secrets(found.config, path, text)
        return found

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the options and groups below a group; `_` begins the name of a part of them."""
        names = super().list(config_path, results_filter)
        return [name for name in names if not name.startswith("_")]


class PackageSource(ImportlibResourcesConfigSource):
    """Hydra's own source of Python packages, which reads no file that is too large."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file. Raises RecipeError and ConfigLoadError."""
        # Hydra's own, a dozen at each start.
        if self.path == "hydra.conf":
            return super().load_config(config_path)
        file = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        name = f"{self.full_path()}/{self._normalize_file_name(config_path)}"
        if file.is_file():
            check_yaml_size(file.read_text("utf-8"), name)
        with naming_file(name):
            return super().load_config(config_path)


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
        return ConfigResult(
            config=content,
            path=self.full_path(),
            provider=self.provider,
            header=self._get_header_dict(header),
        )

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


def add_search_path(conf: Sequence[Path], recipes: Sequence[Path]) -> None:
    """Make Hydra look into the folders from now on; the first has precedence."""
    LauncherSearchPath.take_folders(conf, recipes)
    plugins = Plugins.instance()
    if LauncherSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(RecipeSource)
        plugins.register(LauncherSearchPath)
        # No public call puts a source in the place of one of Hydra's own.
        for source in (GroupSource, PackageSource):
            SourcesRegistry.instance().types[source.scheme()] = source
