"""What of a node's log a person has to see: warnings, and why a run failed.

The functions are pure. Text of a log goes to a terminal only through `plain`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.terminal import printable
from resilience.events import Event
from resilience.plain_files import open_plain

_TRACEBACK = "Traceback (most recent call last):"
_WARNING = re.compile(r"\bWARNING\b|Warning: ")
# How the agent begins the line in which it reports the run's end.
_AGENT_ERROR = re.compile(r"resilience\.agent \S+: the run ends ")
# How it tells in its log what another start of the run has said from what this one says.
_START = re.compile(r"resilience\.agent \S+: start \d+ of the run begins")
# How srun tells of the end of nodes' tasks, and that of a job's start which is no more its last.
_TASK_END = re.compile(r"srun: error: (\S+): tasks? [-\d,]+: (Killed|Exited with exit code (\d+))")
_NEXT_START = re.compile(r"job\.sbatch: .* it is queued again|.*\*\*\* JOB \d+ ON .* REQUEUE")
_SAID = re.compile(r"(?:python -m resilience\.agent|resilience\.agent \S+|job\.sbatch): (.*)")
_NO_ERROR = re.compile(r"srun: (?!error)")
_NUM_LINES_MAX = 60
_NUM_TAIL = 20
_TAIL_BYTES = 1 << 20
READ_BYTES_MAX = 64 << 20
"""Of one log, by one call: a log may have more than fits into memory."""


class LogReader:
    """Reads the lines that are appended to a log."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        """Begin at the log's end as it is now, or as far before it as READ_BYTES_MAX allows."""
        size = path.stat().st_size if path.exists() else 0
        self._path = path
        self._offset = max(0, size - READ_BYTES_MAX) if from_start else size
        self._num_left_out = self._offset if from_start else 0

    def read_new(self) -> list[str]:
        """Return the lines that ended since the last call; none while there is no file."""
        try:
            with open(self._path, "rb", opener=open_plain) as file:
                file.seek(self._offset)
                content = file.read(READ_BYTES_MAX)
        except FileNotFoundError:
            return []
        # A line that is longer than what is read counts as one that has ended.
        end = content.rfind(b"\n") + 1 or len(content) // READ_BYTES_MAX * READ_BYTES_MAX
        self._offset += end
        lines = [plain(line.decode("utf-8", "replace")) for line in content[:end].split(b"\n")]
        if content[:end].endswith(b"\n") or not end:
            lines.pop()
        if self._num_left_out:
            lines.insert(0, f"the {self._num_left_out:,} bytes before are only in {self._path}")
            self._num_left_out = 0
        return lines


def read_tail(path: Path) -> list[str]:
    """Return the lines of a log's last MiB; none where there is no file."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return [plain(line.decode("utf-8", "replace")) for line in file.read().splitlines()]
    except FileNotFoundError:
        return []


def worker_log(node_log: Path, event: Event) -> Path:
    """Return where a node's agent keeps what the worker printed that an event is about."""
    name = f"rank-{event.rank}.generation-{event.generation}.log"
    return node_log.with_suffix("") / name


def plain(text: str) -> str:
    """Return text as one line that a terminal shows and does not obey."""
    return printable(text.rstrip("\r").replace("\t", " ")).replace("\n", "\\n")


def is_warning(line: str) -> bool:
    """Return whether a line is the first of a warning, by Python's or logging's form."""
    return _WARNING.search(line) is not None


def begins_start(line: str) -> bool:
    """Return whether the agent of another start of the run begins to write with a line."""
    return _START.match(line) is not None


def first_end(lines: Sequence[str]) -> tuple[str, int | None] | None:
    """Return which node's task ended first in a job's last start, and its exit status.

    None for the status of one that was killed, and for all where srun tells of no such end. Of
    several nodes at once it is their names as Slurm shortens them.
    """
    begun = max(
        (number for number, line in enumerate(lines) if _NEXT_START.match(line)), default=-1
    )
    ends = filter(None, map(_TASK_END.match, lines[begun + 1 :]))
    return next(((end[1], int(end[3]) if end[3] else None) for end in ends), None)


def last_words(lines: Sequence[str]) -> str:
    """Return what a node's agent, or the script that starts it, has said last."""
    said = [words[1] for words in map(_SAID.match, lines) if words]
    return said[-1].removeprefix("error: ") if said else ""


def failure_lines(lines: Sequence[str], message: str | None) -> list[str]:
    """Return the lines of a failed node's log that say why, of the last start in them.

    With the message of the worker that failed first these are its traceback,
    or none where it left none. Without one they are the first traceback, or
    what was printed last before the agent saw the failure: all that comes
    later follows from it.
    """
    begun = max((number for number, line in enumerate(lines) if begins_start(line)), default=-1)
    lines = lines[begun + 1 :]
    if message is not None:
        last = plain((message.splitlines() or [""])[0])
        return next((found for found in _tracebacks(lines) if found[-1].endswith(last)), [])
    ends = (index for index, line in enumerate(lines, 1) if _AGENT_ERROR.match(line))
    before = lines[: next(ends, len(lines))]
    said = [line for line in before if not _NO_ERROR.match(line)]
    return next(_tracebacks(before), said[-_NUM_TAIL:])


def _tracebacks(lines: Sequence[str]) -> Iterator[list[str]]:
    for index, line in enumerate(lines):
        if _TRACEBACK in line:
            first, *rest = _traceback(lines[index:], line[: line.index(_TRACEBACK)])
            yield [first, *rest[-_NUM_LINES_MAX:]]


def _traceback(lines: Sequence[str], prefix: str) -> list[str]:
    """Return a traceback's lines; torch may begin each with the worker's rank."""
    found = [lines[0]]
    for line in lines[1:]:
        if not line.startswith(prefix):
            continue
        found.append(line)
        text = line[len(prefix) :]
        if text and not text.startswith(" "):
            break
    return found
