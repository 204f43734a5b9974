"""Whatever is done to a vault, its files never take more than the budget, at no moment."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from resilience.tiered.arena import Arena
from resilience.tiered.errors import HeldError, VaultFullError
from resilience.tiered.shard import ShardId
from resilience.tiered.vault import Reading, Vault, Writing
from tests.resilience.tiered.daemons import make_content, make_id, make_meta, segments

PAGE = mmap.PAGESIZE
BUDGET_PAGES = 24
SIZES = st.integers(0, 10 * PAGE)


class VaultMachine(RuleBasedStateMachine):
    """Random sizes, aborts, drops, restarts and failures of the file system."""

    writings: Bundle[Writing] = Bundle("writings")
    readings: Bundle[tuple[Reading, bytes]] = Bundle("readings")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp()) / "arena"
        self.open: list[Writing] = []
        self.contents: dict[ShardId, bytes] = {}
        self.fails_after: int | None = None
        self.step = 0

    @initialize()
    def start(self) -> None:
        self.arena = Arena(self.folder, BUDGET_PAGES * PAGE, segments_max=9, allocate=self.allocate)
        self.vault = Vault(self.arena)
        self.fails_after = None

    def allocate(self, file: int, begin: int, size: int) -> None:
        """Make memory page by page and fail where it was told to, some of it being made."""
        for offset in range(begin, begin + size, PAGE):
            if self.fails_after is not None:
                self.fails_after -= 1
                if self.fails_after < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
            os.posix_fallocate(file, offset, PAGE)
            self.total_is_within_budget()

    @rule(target=writings, num_bytes=SIZES, owner=st.sampled_from("ab"))
    def begin(self, num_bytes: int, owner: str) -> object:
        self.step += 1
        try:
            writing = self.vault.begin(make_id(self.step), num_bytes, owner=owner)
        except VaultFullError:
            return multiple()
        assert all(each.segment is not writing.segment for each in self.open)
        self.open.append(writing)
        return writing

    @rule(writing=consumes(writings), seed=st.integers(0, 3))
    def commit(self, writing: Writing, seed: int) -> None:
        if writing not in self.open:  # of an earlier daemon
            return
        self.open.remove(writing)
        content = make_content(writing.num_bytes, seed)
        writing.memory[:] = content
        writing.commit(make_meta(writing.id, content))
        self.contents[writing.id] = content

    @rule(writing=consumes(writings), is_over=st.booleans())
    def abort(self, writing: Writing, is_over: bool) -> None:
        if writing in self.open:
            self.open.remove(writing)
            writing.abort(lambda: is_over)

    @rule(target=readings, data=st.data())
    def read(self, data: st.DataObject) -> object:
        if not self.contents:
            return multiple()
        shard_id = data.draw(st.sampled_from(sorted(self.contents)))
        return self.vault.read(shard_id), self.contents[shard_id]

    @rule(pair=consumes(readings))
    def close(self, pair: tuple[Reading, bytes]) -> None:
        reading, content = pair
        if reading._vault is self.vault:
            assert bytes(reading.memory) == content
            reading.close()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.contents:
            shard_id = data.draw(st.sampled_from(sorted(self.contents)))
            assert self.vault.drop(shard_id)
            del self.contents[shard_id]

    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        if self.contents:
            with suppress(HeldError):
                self.vault.begin(data.draw(st.sampled_from(sorted(self.contents))), 1)
                raise AssertionError("it is held")

    @rule(pages=st.none() | st.integers(0, 12))
    def break_file_system(self, pages: int | None) -> None:
        self.fails_after = pages

    @rule()
    def restart(self) -> None:
        """Leave files as a SIGKILL would."""
        os.close(self.arena._lock_file)
        self.arena._lock_file = -1
        self.open = []
        self.start()

    @invariant()
    def total_is_within_budget(self) -> None:
        # Twice as much may be in flight nowhere: files are looked at, not the arena's own count.
        assert sum(each.stat().st_size for each in segments(self.folder)) <= BUDGET_PAGES * PAGE

    @invariant()
    def all_that_is_held_is_intact(self) -> None:
        assert {each.id for each in self.vault.metas()} == self.contents.keys()
        for shard_id, content in self.contents.items():
            with self.vault.read(shard_id) as reading:
                assert bytes(reading.memory) == content

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.remove()
        shutil.rmtree(self.folder.parent)


TestVaultBudget = VaultMachine.TestCase
TestVaultBudget.settings = settings(max_examples=60, stateful_step_count=40)
