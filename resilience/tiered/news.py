"""What a daemon tells its node's agent of the store, whenever something of it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

STALL_S = 8.0
"""A store that is to get something and does nothing for so long is said not to answer."""


class StoreNews(BaseModel):
    """How the store does, and how far it is, as one node knows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """s3:BUCKET/PREFIX or folder:PATH."""
    trial: str | None
    """What was wrong with the store at the daemon's start, in its own words; empty: nothing, None:
    it is still being tried."""
    failure: str
    """Why it fails now; empty: it does not."""
    stored_step: int | None
    """The newest step that is whole in the store; None: none is."""
    lacking: tuple[int, ...]
    """Steps that the store is to get and has not."""


def read_news(reply: Mapping[str, Any]) -> StoreNews | None:
    """Return what a daemon's reply says of its store; None where that is nothing."""
    try:
        return StoreNews.model_validate(reply.get("store"))
    except ValidationError:
        return None
