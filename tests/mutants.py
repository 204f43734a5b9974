"""Breaks lines that carry an invariant, one at a time, and has the tests beside them find it.

    make mutants                        # all of them
    make mutants ARGS="opening votes"   # those whose file or name holds one of these words

`mutants.yaml` lists them: by file, the text that is broken, what it becomes, and the tests of which
one has to fail then. All runs on a copy of the tree. A mutant that no test catches has found a
missing test, or a line that nothing needs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".yaml")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "multirun", "runs")
TEST_LIMIT_S = 60
"""A test that a mutant keeps from ending fails after so long."""
LIMIT_S = 240
"""And so do the tests of one mutant together."""
_SUMMARY = "short test summary info"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
_PASSED_STATUS, _FAILED_STATUS = 0, 1


class MutantError(Exception):
    """A mutant cannot be tried; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One line, or a few, that are changed so that an invariant does not hold any more."""

    name: str
    """What does not hold without the text."""
    file: str
    text: str
    becomes: str
    tests: str
    """Arguments of pytest."""

    def apply(self, source: str) -> str:
        """Return the source with the mutant in it.

        Lines after the first are indented as much as the line that the first one stands in.
        """
        first, *more = map(re.escape, self.text.splitlines())
        pattern = rf"^( *)(?! )(.*?){first}" + "".join(rf"\n\1{line}" for line in more)
        matches = list(re.finditer(pattern, source, re.MULTILINE))
        if len(matches) != 1:
            raise MutantError(f"{self.name}: its text is found {len(matches)} times in {self.file}")
        (match,) = matches
        becomes = f"\n{match[1]}".join(self.becomes.splitlines())
        return f"{source[: match.start()]}{match[1]}{match[2]}{becomes}{source[match.end() :]}"


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """Return all mutants of a list."""
    return [
        Mutant(file=file, **{"tests": group["tests"], **each})
        for file, group in yaml.safe_load(path.read_text("utf-8")).items()
        for each in group["mutants"]
    ]


class Copy:
    """A copy of the tree, in which tests run as they do in the tree itself."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._tree = folder / "tree"
        shutil.copytree(root, self._tree, ignore=NOT_COPIED)
        temporary = folder / "tmp"
        temporary.mkdir()
        # The tree that is installed comes after this one, in all processes.
        paths = {"PYTHONPATH": str(self._tree), "TMPDIR": str(temporary)}
        self._variables = {**os.environ, **paths}
        self._mark = f"PYTHONPATH={self._tree}".encode()

    def run(self, tests: str) -> str:
        """Run tests until one fails; returns which, and nothing where all have passed."""
        words = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            f"--timeout={TEST_LIMIT_S}",
        ]
        command = [sys.executable, "-m", "pytest", *words, *shlex.split(tests)]
        try:
            done = subprocess.run(
                command,
                cwd=self._tree,
                env=self._variables,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"the time limit of {LIMIT_S} s"
        finally:
            self._end_processes()
        if done.returncode == _PASSED_STATUS:
            return ""
        failed = _FAILED.search(done.stdout.rpartition(_SUMMARY)[2])
        if done.returncode != _FAILED_STATUS or failed is None:
            last = "\n".join(done.stdout.splitlines()[-20:])
            raise MutantError(f"its tests end with status {done.returncode}:\n{last}")
        return failed[1]

    def find_catcher(self, mutant: Mutant) -> str:
        """Return the test that fails with the mutant in the copy, if one does."""
        path = self._tree / mutant.file
        source = path.read_text("utf-8")
        try:
            self._write(path, mutant.apply(source))
            return self.run(mutant.tests)
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, "utf-8")
        # Of two files of one size, written within a second, Python takes the older one's code.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def _end_processes(self) -> None:
        """End what tests have left running, in whatever session: a mutant may keep it alive."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                file = os.pidfd_open(int(path.parent.name))
                try:
                    if self._mark in path.read_bytes().split(b"\0"):
                        signal.pidfd_send_signal(file, signal.SIGKILL)
                finally:
                    os.close(file)


def try_all(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Try one after the other, a line for each; returns the names of those that are not caught."""
    survivors = []
    for mutant in mutants:
        mutant.apply((root / mutant.file).read_text("utf-8"))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(root, Path(folder))
        for tests in dict.fromkeys(each.tests for each in mutants):
            if failed := copy.run(tests):
                raise MutantError(f"{failed} fails without any mutant")
        for mutant in mutants:
            begin_s = time.monotonic()
            try:
                catcher = copy.find_catcher(mutant)
                words = f"caught by {catcher}" if catcher else f"NOT CAUGHT by {mutant.tests}"
            except MutantError as error:
                catcher, words = "", f"NOT TRIED: {error}"
            seconds = time.monotonic() - begin_s
            print(f"{seconds:5.1f} s  {mutant.file}: {mutant.name}: {words}", flush=True)
            survivors += [] if catcher else [mutant.name]
    return survivors


def choose(mutants: Sequence[Mutant], words: Sequence[str]) -> list[Mutant]:
    """Return those whose file or name holds one of the words; all where there is none."""
    return [
        each
        for each in mutants
        if not words or any(word in f"{each.file} {each.name}" for word in words)
    ]


def main(words: Sequence[str], *, path: Path = LIST, root: Path = ROOT) -> int:
    """Return the exit status: 1 where one is not caught."""
    mutants = choose(read_mutants(path), words)
    try:
        survivors = try_all(mutants, root)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(mutants)} mutants, {len(survivors)} not caught: {', '.join(survivors) or 'none'}")
    return 1 if survivors or not mutants else 0


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    # What is left of the copy goes with it.
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
