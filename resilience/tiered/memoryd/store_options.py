"""What a daemon is told of what it keeps, and of the store below it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, PlainValidator

from resilience.arguments import add_options
from resilience.settings import RamTier, StoreTier
from resilience.tiered.catalog import LowerTier
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.stores.s3 import S3Settings, open_s3
from resilience.tiered.uploads import Cadence, Settings, TierSettings

_REMOVE_MAX_S = 120.0
_OF_S3 = ("region", "endpoint", "part_size_mib", "attempts")
_NOTES = {
    "domains_min": "2; with --peers-hold instead not more than replicas",
    "every_n_steps": "1, but for --store-every-s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """What stays where, for how long."""

    settings: Settings
    store: FolderSettings | S3Settings | None = None
    """The lower tier; None: what no memory holds is lost."""
    drain_s: float = 20.0
    """How long the end waits for what the store has to get, where the arena stays."""

    @property
    def remove_s(self) -> float:
        """Return how long it waits where the arena goes."""
        return max(self.drain_s, min(self.store.deadline_s, _REMOVE_MAX_S) if self.store else 0.0)

    def open_shelf(self) -> Shelf | None:
        """Return the store as this daemon sees it; connects to nothing yet."""
        if self.store is None:
            return None
        if isinstance(self.store, FolderSettings):
            return Shelf(open_folder(self.store), "folder", str(self.store.folder))
        place = "/".join(each for each in (self.store.bucket, self.store.prefix.strip("/")) if each)
        return Shelf(open_s3(self.store), "s3", place)


def _place(text: str) -> tuple[LowerTier, str]:
    if text.startswith("s3://") and text.removeprefix("s3://").partition("/")[0]:
        return "s3", text.removeprefix("s3://")
    if text.startswith("folder:") and text.removeprefix("folder:"):
        return "folder", text.removeprefix("folder:")
    raise argparse.ArgumentTypeError(f"{text!r} is neither folder:PATH nor s3://BUCKET/PREFIX")


class _Store(BaseModel):
    """What the command line says in its own way."""

    store: Annotated[tuple[LowerTier, str] | None, PlainValidator(_place)] = None
    """Where steps go that have to outlive all nodes, folder:PATH or s3://BUCKET/PREFIX
    (default: nowhere)."""


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command line."""
    group = parser.add_argument_group("what is kept, and the store")
    add_options(group, RamTier, {"keep": 1, "domains_min": None}, notes=_NOTES)
    add_options(group, _Store)
    unset = dict.fromkeys(StoreTier.model_fields.keys() - {"url"})
    defaults = {**unset, "deadline_s": 60.0, "path_style": False}
    add_options(group, StoreTier, defaults, prefix="store_", notes=_NOTES)


def read_keep_options(
    parser: argparse.ArgumentParser, given: argparse.Namespace, *, settle_s: float
) -> KeepOptions:
    """Return what the options say; ends the process with one message where they are wrong."""
    settings = _read_settings(parser, given, settle_s)
    if given.store_every_n_steps and given.store_every_s:
        parser.error("argument --store-every-s: not allowed with --store-every-n-steps")
    told = {name: getattr(given, f"store_{name}") for name in _OF_S3}
    told["force_path_style"] = given.store_path_style
    changed = {name: value for name, value in told.items() if value}
    if given.store is None:
        needing = (given.store_every_n_steps, given.store_every_s, given.store_keep)
        if changed or any(needing) or given.store_waiting_max:
            parser.error("argument --store: has to be given with the other options of the store")
        return KeepOptions(settings=settings)
    tier, place = given.store
    if tier == "folder" and changed:
        parser.error("argument --store: endpoint, region, parts and attempts are of s3:// alone")
    try:
        store = _read_store(tier, place, given.store_deadline_s, changed)
    except ValueError as error:
        parser.error(f"argument --store: {error}")
    every_n_steps = given.store_every_n_steps
    if every_n_steps is None and given.store_every_s is None:
        every_n_steps = 1
    lower = TierSettings(
        cadence=Cadence(every_n_steps=every_n_steps, every_s=given.store_every_s),
        keep=given.store_keep,
        waiting_max=given.store_waiting_max,
    )
    settings = replace(settings, lower={tier: lower})
    return KeepOptions(settings=settings, store=store, drain_s=given.drain_s)


def _read_settings(
    parser: argparse.ArgumentParser, given: argparse.Namespace, settle_s: float
) -> Settings:
    """Return what the options say of memory."""
    keepers = given.replicas if given.peers_hold == "instead" else 0
    domains_min = given.domains_min or (min(2, keepers) if keepers else 2)
    if keepers and domains_min > keepers:
        parser.error(
            f"argument --domains-min: {domains_min} is more than --replicas {keepers}, and with "
            f"--peers-hold instead nobody else has a shard; 1 to {keepers} is allowed"
        )
    return Settings(
        keep=given.keep,
        domains_min=domains_min,
        keepers=keepers,
        settle_s=settle_s,
        expire_s=given.expire_s,
    )


def _read_store(
    tier: LowerTier, place: str, deadline_s: float, changed: dict[str, str | int | bool]
) -> FolderSettings | S3Settings:
    if tier == "folder":
        return FolderSettings(folder=Path(place).absolute(), deadline_s=deadline_s)
    bucket, _, prefix = place.partition("/")
    return S3Settings(bucket=bucket, prefix=prefix, deadline_s=deadline_s, **changed)  # type: ignore[arg-type]
