"""TieredWriter and TieredReader with the constructors of FileSystemWriter and FileSystemReader."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from resilience.tiered.client import TieredClient
from resilience.tiered.dcp import TieredReader, TieredWriter

STEP = 0
PathName = str | os.PathLike[str]


def _connect(path: PathName) -> TieredClient:
    name = hashlib.blake2b(os.fspath(path).encode(), digest_size=12).hexdigest()
    socket = Path(os.environ["TIERED_TESTS_SOCKET"])
    return TieredClient(socket, namespace=f"torch-{name}", job="torch")


class PathWriter(TieredWriter, BlockingAsyncStager):
    """Writes the namespace of a path; what is about files is taken, and means nothing."""

    def __init__(
        self,
        path: PathName,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 0,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        **options: Any,
    ) -> None:
        TieredWriter.__init__(self, _connect(path), step=STEP, overwrite=overwrite)
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        self.path = path

    def reset(self, checkpoint_id: PathName | None = None) -> None:
        if checkpoint_id:
            self.path, self._client = checkpoint_id, _connect(checkpoint_id)
        super().reset()

    @property
    def checkpoint_id(self) -> Any:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathName) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)


class PathReader(TieredReader):
    """Reads the namespace of a path. Unpickles anything and drops items, as the original does."""

    def __init__(self, path: PathName, **options: Any) -> None:
        super().__init__(_connect(path), step=STEP, allow_pickle=True, allow_partial=True)
        self.path = path

    def reset(self, checkpoint_id: PathName | None = None) -> None:
        if checkpoint_id:
            self.path, self._client = checkpoint_id, _connect(checkpoint_id)
        super().reset()

    @property
    def checkpoint_id(self) -> Any:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathName) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)
