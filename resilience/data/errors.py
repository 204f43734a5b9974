"""Errors of the batch cache.

DataCacheError
|-- CacheFolderError   the folder cannot be made or used; the message says what to change
|-- CacheFullError     the budget, or the file system, has no room for a single batch
|-- LateBatchError     a batch did not come within the deadline; says what the producer does
|-- ProducerError      the producer cannot start or go on; says what to change
|-- CacheKeyError      the key of an encrypted cache cannot be had; says what to change
|   `-- WrongKeyError  the data key is of another key; what it encrypted is made again
|-- SourceError        an exception of the dataset that cannot be made again as itself
`-- DamagedBatchError  stored bytes are not what was written; the batch is made again
"""

from __future__ import annotations

from resilience.errors import ResilienceError


class DataCacheError(ResilienceError):
    """Root of the errors of the batch cache."""


class CacheFolderError(DataCacheError):
    """The folder of the cache cannot be made or used."""


class CacheFullError(DataCacheError):
    """There is no room for a single batch, within the budget or on the file system."""


class LateBatchError(DataCacheError):
    """A batch did not come within the deadline."""


class ProducerError(DataCacheError):
    """The producer cannot start, or ends again and again without making a batch."""


class CacheKeyError(DataCacheError):
    """The key of the cache cannot be had; the message says what to change."""


class WrongKeyError(CacheKeyError):
    """The data key of this cache was wrapped by another key, or is damaged."""


class SourceError(DataCacheError):
    """The dataset raised what cannot be raised here as itself; the message says what it was."""


class DamagedBatchError(DataCacheError):
    """Stored bytes are not what was written."""
