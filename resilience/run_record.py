"""The record of a run in its folder: which run it is, and how often it has been started.

The agent that comes first makes it, and it stays whatever starts follow: files that are created
exclusively, so that of several nodes one writes each. Everything that outlives a process carries
the run's id. Where nodes see no common folder each has its own record; the id is the same, as it
is made of what all nodes of a start know.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from resilience.node_config import BranchPoint, RunConfig
from resilience.plain_files import read_plain
from resilience.whole_files import write_first

RECORD_FOLDER = "record"
RUN_VARIABLE = "RESILIENCE_RUN"
"""Tells a worker the run's id."""
START_VARIABLE = "RESILIENCE_START"
"""Tells a worker which start of the run it belongs to."""
GOES_ON_VARIABLE = "RESILIENCE_GOES_ON"
"""Tells a worker, as 1, that the run never begins without a state that it has saved."""
BRANCH_VARIABLE = "RESILIENCE_BRANCH"
"""Tells a worker, as JSON, the state of another run with which its own begins; empty for none."""
TAKES_OVER_VARIABLE = "RESILIENCE_TAKES_OVER"
"""Tells a worker, as 1, that the run takes its namespace from another."""
RUN_DIR_VARIABLE = "LAUNCHER_RUN_DIR"
"""Tells a program of a user's the folder of its run, the same at each start."""
FAULTS_VARIABLE = "RESILIENCE_FAULTS"
"""Tells it the faults that its protected loop fires, as the JSON list of `FAULT_LIST`."""
_RUN_FILE = "run.json"
_START = "start-"
_STORED_FILE = "stored.json"


class RunRecord(BaseModel):
    """Which run a folder holds; made at its first start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """32 hex digits that no other run has."""
    recipe: str
    version: int
    digest: str
    """Of the job that the run began with."""
    began_at: float
    """Unix seconds."""
    branch: BranchPoint | None = None
    """The state of another run with which it began."""


class RunStart(BaseModel):
    """One start of a run by whoever schedules it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    """From 0, in the order of the starts."""
    name: str
    """Of the scheduler's job and attempt; all nodes of a start have the same."""
    digest: str
    """Of the job that this start trains."""
    began_at: float
    """Unix seconds."""


class RecordError(ValueError):
    """A file of the record is torn, or somebody else's; the message names it."""


_Entry = TypeVar("_Entry", RunRecord, RunStart)


def make_run_id(token: str, name: str) -> str:
    """Return the id that a run gets which begins with this start.

    Nobody else has the run's random token, so no other run has the id. Without a token there
    is one node, and the id is random.
    """
    secret = token.encode() or secrets.token_bytes(32)
    key = hashlib.blake2b(secret, digest_size=32).digest()
    return hashlib.blake2b(name.encode(), key=key, digest_size=16).hexdigest()


def open_record(run_dir: Path, config: RunConfig, *, run_id: str, now: float) -> RunRecord:
    """Return the run's record, which is made where there is none, with this id.

    `now` is in unix seconds. Raises OSError and RecordError.
    """
    path = run_dir / RECORD_FOLDER / _RUN_FILE
    own = RunRecord(
        run_id=run_id,
        recipe=config.recipe,
        version=config.version,
        digest=config.digest,
        began_at=now,
        branch=config.branch,
    )
    write_first(path, own.model_dump(mode="json"), secrets.token_hex(8))
    return _read(path, RunRecord)


def note_start(run_dir: Path, config: RunConfig, *, name: str, now: float) -> RunStart:
    """Return the start of this name, which is added where no node has done so.

    Raises OSError, RecordError, and ValueError where a new run of another job would go on from
    what this one has stored.
    """
    while True:
        files = sorted(_start_files(run_dir))
        starts = list(_read_whole(files))
        if known := next((each for each in starts if each.name == name), None):
            return known
        is_other = bool(starts) and starts[-1].digest != config.digest
        if is_other and not config.continues and is_stored(run_dir):
            raise ValueError(
                f"{run_dir} has checkpoints of another job (digest {starts[-1].digest[:12]}) than "
                f"this one (digest {config.digest[:12]}), which would go on from them; set "
                "run.name to a name that is free, or give what is to change to `launcher continue` "
                "with the folder that the run was submitted from"
            )
        own = RunStart(
            number=files[-1][0] + 1 if files else 0,
            name=name,
            digest=config.digest,
            began_at=now,
        )
        path = _start_file(run_dir, own.number)
        if write_first(path, own.model_dump(mode="json"), secrets.token_hex(8)):
            return own


def read_record(run_dir: Path) -> RunRecord | None:
    """Return a folder's record, None where no run has begun. Raises OSError, RecordError."""
    try:
        return _read(run_dir / RECORD_FOLDER / _RUN_FILE, RunRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_starts(run_dir: Path) -> tuple[RunStart, ...]:
    """Return the starts of a run, the first one first, without what is torn. Raises OSError."""
    return tuple(_read_whole(sorted(_start_files(run_dir))))


def read_starts_after(run_dir: Path, number: int) -> tuple[RunStart, ...]:
    """Return the starts of a run since the one of this number. Raises OSError, RecordError.

    Costs one look at a file that is not there, so that every node of a large run may ask often.
    """
    found: list[RunStart] = []
    while (path := _start_file(run_dir, number + 1 + len(found))).exists():
        found.append(_read(path, RunStart))
    return tuple(found)


def mark_stored(run_dir: Path) -> None:
    """Note that a step of the run is whole in its store. Raises OSError."""
    write_first(run_dir / RECORD_FOLDER / _STORED_FILE, {}, secrets.token_hex(8))


def is_stored(run_dir: Path) -> bool:
    """Return whether a step of the run was ever whole in its store. Raises OSError."""
    return (run_dir / RECORD_FOLDER / _STORED_FILE).exists()


def _read_whole(files: Sequence[tuple[int, Path]]) -> Iterator[RunStart]:
    for _, path in files:
        with suppress(RecordError):
            yield _read(path, RunStart)


def _start_file(run_dir: Path, number: int) -> Path:
    return run_dir / RECORD_FOLDER / f"{_START}{number}.json"


def _start_files(run_dir: Path) -> Iterator[tuple[int, Path]]:
    for path in (run_dir / RECORD_FOLDER).glob(f"{_START}*.json"):
        number = path.stem.removeprefix(_START)
        if number.isdecimal():
            yield int(number), path


def _read(path: Path, model: type[_Entry]) -> _Entry:
    try:
        return model.model_validate_json(read_plain(path), strict=True)
    except ValidationError as error:
        raise RecordError(
            f"{path} is torn or no record of ours; put it right from a copy, or take the run's "
            "checkpoints into another run"
        ) from error
