"""The folder of one run: choose it, and put rendered files into it.

A folder that holds a run or a submission is never written to again, so that no
rendering can change what a run's record says it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from launcher.composition.frozen import is_frozen
from launcher.errors import OutsideError, RecipeError
from resilience.event_files import event_files
from resilience.plain_files import parse_json, read_plain, read_plain_text
from resilience.run_record import RECORD_FOLDER
from resilience.whole_files import draft_of, write_first

EVENTS_FILE = "events.jsonl"
JOB_FILE = "job.json"
RECIPE_FILE = "recipe.yaml"
"""The recipe and overrides that a run was started with, frozen."""
NODE_FILE = "node.json"
SUBMITTED_FILE = "submitted.json"
# Less room than this is none for a run.
_PROBE_BYTES = 1 << 20


_COMMAND = "# command "


def command_comment(words: Sequence[str]) -> str:
    """Return the last line of a run's recipe, with what the launcher was told."""
    return f"{_COMMAND}{json.dumps(shlex.join(['launcher', *words]))}\n"


def read_command(folder: Path) -> str | None:
    """Return the command line that began a run; None where its folder does not say."""
    try:
        last = read_plain_text(folder / RECIPE_FILE).splitlines()[-1]
        command = parse_json(last.removeprefix(_COMMAND)) if last.startswith(_COMMAND) else None
    except (OSError, ValueError, IndexError):
        return None
    return command if isinstance(command, str) else None


def write_run_dir(
    given: str | None, name: str, start: Path, files: Mapping[str, str], claim: str | None
) -> Path:
    """Choose the folder of a run, write its rendered files into it, and return it.

    `claim` is the file by which others see that the folder is taken, EVENTS_FILE or
    SUBMITTED_FILE, None for a rendering alone. Of two processes that want one folder, the second
    takes the next. Raises RecipeError and OutsideError.
    """
    while True:
        folder = choose_run_dir(given, name, start)
        with contextlib.suppress(_TakenError):
            write_files(folder, files, claim)
            return folder


class _TakenError(Exception):
    """Another process has claimed the folder since it was looked at."""


def choose_run_dir(given: str | None, name: str, start: Path) -> Path:
    """Return the folder for a run called `name` that is started in the folder `start`.

    Without one given it is runs/<name>, or runs/<name>-2 and so on where a run
    is there already. Raises RecipeError where the given one holds a run.
    """
    if given is not None:
        folder = (start / given).absolute()
        if _holds_run(folder):
            raise RecipeError(
                f"run.dir {given!r} holds a run already; allowed: a folder without "
                f"{EVENTS_FILE} and {SUBMITTED_FILE}"
            )
        return folder
    number = 1
    while _holds_run(folder := start / "runs" / (name if number == 1 else f"{name}-{number}")):
        number += 1
    return folder


def _holds_run(folder: Path) -> bool:
    # Unlike Path.exists, which lets a name that is too long for a file be its caller's problem.
    names = (SUBMITTED_FILE, RECORD_FOLDER)
    is_there = any(os.path.lexists(folder / name) for name in names)
    return is_there or bool(event_files(folder / EVENTS_FILE))


def write_files(folder: Path, files: Mapping[str, str], claim: str | None = None) -> None:
    """Write rendered files, each whole or not at all, and remove an earlier rendering's.

    `claim` is the name of an empty file that has to be new, and is made before anything else.
    Only what an earlier rendering left is replaced: raises RecipeError where a
    file of that name is somebody's own, before anything is written, and
    OutsideError where the folder cannot be written.
    """
    try:
        if claim is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _claim(folder / claim)
        try:
            _replace_files(folder, files)
        except (OSError, RecipeError):
            if claim is not None:
                (folder / claim).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutsideError(
            f"cannot write to {folder}: {error.strerror or error}; set run.dir to a folder that "
            "can be written"
        ) from error


def _replace_files(folder: Path, files: Mapping[str, str], kept: str | None = None) -> None:
    ours = _rendered_before(folder)
    if foreign := [name for name in files if name not in ours and (folder / name).exists()]:
        raise RecipeError(
            f"{folder} holds {', '.join(foreign)}, which no rendering left there; "
            "set run.dir to another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in ours - {*files, kept}:
        (folder / name).unlink(missing_ok=True)
    for name, text in files.items():
        write_whole(folder / name, text)


def next_job_number(folder: Path) -> int:
    """Return the number under which `replace_job` keeps the present job of a run."""
    return sum(1 for _ in (folder / RECORD_FOLDER).glob("job-*.json"))


def replace_job(folder: Path, files: Mapping[str, str], number: int) -> None:
    """Put the files of the job with which a run goes on in the place of those before.

    What the run's start before was made of stays in its record, as job-N.json and submitted-N.json;
    the recipe that the run began with stays where it is.
    The number is that of before the run was looked at: whoever has gone on with it since has taken
    it. Raises OutsideError then, and where the folder cannot be written.
    """
    record = folder / RECORD_FOLDER
    try:
        record.mkdir(exist_ok=True)
        if not write_first(
            record / f"job-{number}.json",
            parse_json(read_plain(folder / JOB_FILE)),
            secrets.token_hex(8),
        ):
            raise OutsideError(f"another launcher goes on with {folder}")
        if (folder / SUBMITTED_FILE).exists():
            text = read_plain_text(folder / SUBMITTED_FILE)
            write_whole(record / f"submitted-{number}.json", text)
        _replace_files(folder, files, kept=RECIPE_FILE)
    except OSError as error:
        raise OutsideError(f"cannot write to {folder}: {error.strerror or error}") from error


def _claim(path: Path) -> None:
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise _TakenError from error


def _rendered_before(folder: Path) -> set[str]:
    """Return the files that the job.json in the folder was rendered into."""
    try:
        content = parse_json(read_plain(folder / JOB_FILE))
        kind, num_nodes = content["cluster"]["kind"], content["trainer"]["num_nodes"]
        manifests = {"manifest.yaml"}
        if elastic := content["resilience"]["elastic"]:
            num_nodes = max(num_nodes, elastic["nodes_max"])
            is_hyperpod = content["cluster"].get("job_kind") == "hyperpod"
            manifests |= set() if is_hyperpod else {"growth.yaml"}
        if recovery := content["resilience"]["checkpointless"]:
            num_nodes += recovery["standby_nodes"]
        numbers = {each.name: each.stem[5:] for each in folder.glob("node-*.sh")}
        scripts = {n for n, text in numbers.items() if text.isdecimal() and int(text) < num_nodes}
        names = {"local": scripts, "slurm": {"job.sbatch"}, "k8s": manifests}.get(kind, set())
    except (OSError, ValueError, LookupError, TypeError):
        return set()
    recipe = {RECIPE_FILE} if is_frozen(folder / RECIPE_FILE) else set()
    return {JOB_FILE, NODE_FILE} | names | recipe


def write_submission(folder: Path, content: Mapping[str, object]) -> None:
    """Write submitted.json, which marks the folder as used.

    Raises OutsideError, which names the job: it is submitted by then.
    """
    try:
        write_whole(folder / SUBMITTED_FILE, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise OutsideError(
            f"job {content['job_id']} is submitted, but {folder} cannot be written: {error}"
        ) from error


def find_write_problem(folder: Path) -> str | None:
    """Return why a folder takes no more files, in the system's words, None where it does."""
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_full(folder: Path) -> bool:
    """Return whether the disk of a folder has no room but what root may keep; writes nothing."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_blocks > 0 and disk.f_bavail == 0


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = draft_of(path, str(os.getpid()))
    try:
        with partial.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        partial.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
