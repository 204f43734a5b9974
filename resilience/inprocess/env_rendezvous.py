"""torch's `env://` in a program that an agent has started: it opens the generation's own store.

torch finds the way to meet by a table of handlers that is private, and refuses a second one for
`env`. Nothing else of torch's is replaced.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from resilience.inprocess.plain import own_opening, own_store
from resilience.inprocess.variables import rank_variables

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_MODULE = "torch.distributed.rendezvous"
_PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def serve_env() -> None:
    """Have `env://` open the store of this process's generation, now or once torch is imported."""
    if module := sys.modules.get(_MODULE):
        _take_place(module)
    else:
        sys.meta_path.insert(0, _AfterImport())


def _take_place(module: ModuleType) -> None:
    handlers: dict[str, Any] = module._rendezvous_handlers  # noqa: SLF001
    by_torch, process = handlers["env"], os.getpid()
    num_opened = 0

    def open_store(
        url: str, timeout: timedelta = timedelta(minutes=30), **options: Any
    ) -> Iterator[tuple[Store, int, int]]:
        nonlocal num_opened
        # A child, and a program that has chosen another place, meet as torch has them meet.
        store = own_store() if os.getpid() == process and _is_as_given(url) else None
        if store is None:
            yield from by_torch(url, timeout, **options)
            return
        from torch.distributed.distributed_c10d import PrefixStore

        store.set_timeout(timeout)
        num_opened += 1
        # Each opening has its keys: those of a group that was destroyed tell of closed sockets.
        named = PrefixStore(f"env/{num_opened}", store)
        yield named, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        raise RuntimeError("env:// opens a group once; its members do not change")

    handlers["env"] = open_store


def _is_as_given(url: str) -> bool:
    """Return whether the environment, and what the URL says beside it, are the agent's."""
    opening = own_opening()
    if opening is None:
        return False
    given = rank_variables(opening)
    told = {name.upper(): values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
    found = {name: told.get(name, os.environ.get(name)) for name in _PLACE}
    return all(found[name] == given[name] for name in _PLACE)


class _AfterImport(MetaPathFinder):
    """Finds torch's module as all others are found, and has the handler replaced behind it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenTakePlace(spec.loader)
        return spec


class _ThenTakePlace(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _take_place(module)
