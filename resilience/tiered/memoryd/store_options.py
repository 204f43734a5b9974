"""What a daemon is told of what it keeps, and of the store below it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from resilience.arguments import positive, seconds
from resilience.tiered.catalog import LowerTier
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.stores.s3 import S3Settings, open_s3
from resilience.tiered.uploads import Cadence, Settings, TierSettings

_REMOVE_MAX_S = 120.0


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


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command line."""
    add = parser.add_argument_group("what is kept, and the store").add_argument
    add("--keep", type=positive, default=1, metavar="N",
        help="how many complete steps stay in memory (default 1)")  # fmt: skip
    add("--domains-min", type=positive, metavar="N",
        help="in how many failure domains a step has to be to count as complete, if there are "
             "so many (default 2; with --peers-hold instead not more than replicas)")  # fmt: skip
    add("--store", dest="store_url", type=_place, metavar="folder:PATH|s3://BUCKET/PREFIX",
        help="where steps go that have to outlive all nodes (default: nowhere)")  # fmt: skip
    add("--store-every-n-steps", type=positive, metavar="N",
        help="the store gets the steps that N divides (default: every one)")  # fmt: skip
    add("--store-every-s", type=seconds, metavar="S", help="the store gets a step every S seconds")
    add("--store-keep", type=positive, metavar="N",
        help="how many complete steps stay in the store (default: all)")  # fmt: skip
    add("--store-waiting-max", type=positive, metavar="N",
        help="how many steps may wait in memory for a slow store; others are left out "
             "(default: none is)")  # fmt: skip
    add("--store-deadline-s", type=seconds, default=60.0, metavar="S",
        help="how long the store may take for one operation, beside its bytes "
             "(default 60)")  # fmt: skip
    add("--store-endpoint", metavar="URL",
        help="a server of S3's protocol that is not AWS's, as http://127.0.0.1:8333")  # fmt: skip
    add("--store-region", metavar="NAME", help="region of the bucket (default us-east-1)")
    add("--store-path-style", action="store_true", help="name the bucket in the path of the URL")
    add("--store-part-size-mib", type=positive, metavar="N",
        help="size of an upload's parts, 10,000 at most (default 16)")  # fmt: skip
    add("--store-attempts", type=positive, metavar="N",
        help="how often a request to S3 is sent until it has failed (default 5)")  # fmt: skip
    add("--drain-s", type=seconds, default=20.0, metavar="S",
        help="how long the end waits for what the store has to get; where the arena goes, as long "
             "as --store-deadline-s, 120 at most (default 20)")  # fmt: skip


def read_keep_options(
    parser: argparse.ArgumentParser, given: argparse.Namespace, *, settle_s: float
) -> KeepOptions:
    """Return what the options say; ends the process with one message where they are wrong."""
    settings = _read_settings(parser, given, settle_s)
    if given.store_every_n_steps and given.store_every_s:
        parser.error("argument --store-every-s: not allowed with --store-every-n-steps")
    named = {
        "region": given.store_region,
        "endpoint": given.store_endpoint,
        "part_size_mib": given.store_part_size_mib,
        "attempts": given.store_attempts,
        "force_path_style": given.store_path_style or None,
    }
    changed = {name: value for name, value in named.items() if value is not None}
    if given.store_url is None:
        needing = (given.store_every_n_steps, given.store_every_s, given.store_keep)
        if changed or any(needing) or given.store_waiting_max:
            parser.error("argument --store: has to be given with the other options of the store")
        return KeepOptions(settings=settings)
    tier, place = given.store_url
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


def _place(text: str) -> tuple[LowerTier, str]:
    if text.startswith("s3://") and text.removeprefix("s3://").partition("/")[0]:
        return "s3", text.removeprefix("s3://")
    if text.startswith("folder:") and text.removeprefix("folder:"):
        return "folder", text.removeprefix("folder:")
    raise argparse.ArgumentTypeError(f"{text!r} is neither folder:PATH nor s3://BUCKET/PREFIX")
