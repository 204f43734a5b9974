"""Errors of the tiers.

TieredError
|-- ArenaError      the arena's folder cannot be used; the message says what to change
|-- VaultFullError  no room within the budget; the save is left out and the run goes on
|-- HeldError       this very shard is held already, or is being written
|-- StaleError      a newer generation has written this step or a later one, or a newer run began
|-- RefusedError    wrong token, or a namespace that belongs to another job
|-- LostError       the daemon is gone, or did not answer in time
|-- FormatError     what another library has stored is not what it should be, or asks for more
`-- TierError       S3 or a folder failed; the message holds its own words
"""

from __future__ import annotations

from resilience.errors import ResilienceError


class TieredError(ResilienceError):
    """Root of the errors of the tiers."""


class ArenaError(TieredError):
    """The arena's folder cannot be used."""


class VaultFullError(TieredError):
    """There is no room within the budget."""


class HeldError(TieredError):
    """The shard is held already, or somebody is writing it."""


class StaleError(TieredError):
    """The shard's generation is over: a newer one has written this step or a later one."""


class RefusedError(TieredError):
    """The token is wrong, or the namespace belongs to another job."""


class LostError(TieredError):
    """The daemon is gone, or did not answer in time."""


class FormatError(TieredError):
    """What another library has stored is not what it should be, or asks for more than data."""


class TierError(TieredError):
    """S3 or a folder failed."""
