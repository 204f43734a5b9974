"""Which store a person means: its settings, and the store of such settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resilience.settings import StoreTier
from resilience.tiered.catalog import LowerTier
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.stores.s3 import S3Settings, open_s3
from resilience.tiered.stores.store import Store

StoreSettings = FolderSettings | S3Settings
OF_S3 = ("region", "endpoint", "part_size_mib", "attempts")
"""Settings that have the same name everywhere, and no meaning for a folder."""


def parse_place(text: str) -> tuple[LowerTier, str]:
    """Return the tier that a URL names and the place in it; raises ValueError."""
    if text.startswith("s3://") and text.removeprefix("s3://").partition("/")[0]:
        return "s3", text.removeprefix("s3://")
    if text.startswith("folder:") and text.removeprefix("folder:"):
        return "folder", text.removeprefix("folder:")
    raise ValueError(f"{text!r} is neither folder:PATH nor s3://BUCKET/PREFIX")


def make_settings(
    tier: LowerTier, place: str, *, deadline_s: float, **changed: Any
) -> StoreSettings:
    """Return the settings of a store; `changed` are those of S3. Raises ValueError."""
    if tier == "folder":
        return FolderSettings(folder=Path(place), deadline_s=deadline_s)
    bucket, _, prefix = place.partition("/")
    return S3Settings(bucket=bucket, prefix=prefix, deadline_s=deadline_s, **changed)


def open_settings(settings: StoreSettings) -> Store:
    """Return the store; connects to nothing yet."""
    return open_folder(settings) if isinstance(settings, FolderSettings) else open_s3(settings)


def open_as(url: str, tier: StoreTier) -> Store:
    """Return the store of a URL, reached as this tier is. Raises ValueError."""
    told = {**{name: getattr(tier, name) for name in OF_S3}, "force_path_style": tier.path_style}
    changed = {name: value for name, value in told.items() if value}
    kind, place = parse_place(url)
    return open_settings(make_settings(kind, place, deadline_s=tier.deadline_s, **changed))
