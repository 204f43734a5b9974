"""Teach Hydra where recipes are: a config source and an entry in its search path.

Hydra names a group by its folder, so that `recipe=llama/x` would need a folder
`recipe`. The source below serves the group `recipe` from any folder of recipes
instead: ours, a team's, or the one that a recipe given by path lies in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from launcher.errors import RecipeError

GROUP = "recipe"


class RecipeSource(ConfigSource):
    """Serves `recipe/<family>/<name>` from `<folder>/<family>/<name>.yaml`."""

    @staticmethod
    def scheme() -> str:
        """Return what stands before :// in the search path."""
        return "recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one recipe. Raises ConfigLoadError, or YAMLError with file and line."""
        path = self._locate(self._normalize_file_name(config_path))
        if path is None or not path.is_file():
            raise ConfigLoadError(f"no recipe at {config_path}")
        with path.open(encoding="utf-8") as stream:
            try:
                header = self._get_header_dict(stream.read(512))
                stream.seek(0)
                content = OmegaConf.load(stream)
            except UnicodeDecodeError as error:
                raise RecipeError(f"{path} is no UTF-8 text: {error}") from error
        return ConfigResult(
            config=content, path=self.full_path(), provider=self.provider, header=header
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
        """Return the names of families and recipes in a group, sorted."""
        names: list[str] = []
        folder = self._locate(config_path)
        for path in sorted(folder.iterdir()) if folder and folder.is_dir() else ():
            if path.is_dir() or path.suffix == ".yaml":
                self._list_add_result(
                    files=names,
                    file_path=f"{config_path}/{path.name}",
                    file_name=path.name,
                    results_filter=results_filter,
                )
        return sorted(set(names))

    def _locate(self, config_path: str) -> Path | None:
        """Return the path below our folder, or None where it is none of ours."""
        first, _, rest = config_path.partition("/")
        return Path(self.path, rest) if first == GROUP and ".." not in rest.split("/") else None


class LauncherSearchPath(SearchPathPlugin):
    """Adds the folders that `add_search_path` was told last."""

    conf: ClassVar[Sequence[Path]] = ()
    recipes: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Put a team's groups before ours, and recipes behind."""
        main = SearchPathQuery(provider="main")
        for path in self.conf:
            search_path.prepend(provider="launcher", path=f"file://{path}", anchor=main)
        for path in self.recipes:
            search_path.append(provider="launcher", path=f"recipes://{path}")


def add_search_path(conf: Sequence[Path], recipes: Sequence[Path]) -> None:
    """Make Hydra look into the folders from now on; the first has precedence."""
    LauncherSearchPath.conf = conf
    LauncherSearchPath.recipes = recipes
    plugins = Plugins.instance()
    if LauncherSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(RecipeSource)
        plugins.register(LauncherSearchPath)
