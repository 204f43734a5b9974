"""The files that a job reads and the checkpoints that it takes over, as this machine sees them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.lineage import checkpoints_namespace
from launcher.job.workload import Jsonl, S3Jsonl, ScriptTrainer
from resilience.agent.evidence.life import find_life
from resilience.run_record import RecordError, read_record

_Problem = Callable[[Path], str | None]


def check_inputs(job: Job) -> None:
    """Raise RecipeError where this machine lacks what the workers would read, one line a field."""
    if lines := list(_lacking(job)):
        raise RecipeError("\n  ".join(["action 'run': this machine lacks inputs:", *lines]))


def check_take_over(job: Job, run_dir: Path) -> None:
    """Raise RecipeError where the run that has the namespace of a job's store is seen to live.

    Looks into a store that is a folder which this machine has. The daemons of the run look again.
    """
    tiered = job.resilience.tiered
    url = (tiered.store.url if tiered and tiered.store else None) or ""
    if not url.startswith("folder:/") or find_spec("xxhash") is None:
        return
    from resilience.tiered.errors import TierError
    from resilience.tiered.stores.folder import FolderObjects, FolderSettings
    from resilience.tiered.stores.owner import find_owners

    store = FolderObjects(FolderSettings(folder=Path(url.removeprefix("folder:"))))
    namespace = checkpoints_namespace(job, run_dir)
    # The store may not be there yet, or on the nodes alone; these tell of a torn record, too.
    with suppress(TierError, OSError, RecordError):
        own = read_record(run_dir)
        for owner in find_owners(store, namespace):
            is_other = own is None or owner.run != own.run_id
            if is_other and (sign := find_life(owner.folder, owner.run)):
                whose = f"the namespace {namespace!r} of {url} belongs to {owner.describe(sign)}"
                raise RecipeError(f"run.take_over true: {whose}")


def _lacking(job: Job) -> Iterator[str]:
    for field, given, find_problem in _inputs(job):
        if problem := find_problem(Path(given)):
            yield f"{field} {given!r} {problem}"


def _inputs(job: Job) -> Iterator[tuple[str, str, _Problem]]:
    if isinstance(job.trainer, ScriptTrainer):
        yield from _inputs_of_script(job.trainer, has_path="PYTHONPATH" in job.env)
    if job.model and job.model.weights is not None:
        yield "model.weights", job.model.weights, _problem_of_model
    if isinstance(job.data, Jsonl):
        yield "data.path", job.data.path, _problem_of_file
    if isinstance(job.data, Jsonl | S3Jsonl) and job.data.tokenizer != "bytes":
        yield "data.tokenizer", job.data.tokenizer, _problem_of_folder


def _inputs_of_script(
    trainer: ScriptTrainer, *, has_path: bool
) -> Iterator[tuple[str, str, _Problem]]:
    folder = Path(trainer.folder) if trainer.folder else Path.cwd()
    if trainer.folder:
        yield "trainer.folder", trainer.folder, _problem_of_folder
    if trainer.python:
        yield "trainer.python", trainer.python, _problem_of_executable
    if not (trainer.python or trainer.is_executable):
        for module in trainer.preload:
            yield "trainer.preload", module, _problem_of_module
        if trainer.module and not has_path:
            find_module = partial(_problem_of_entry, module=trainer.module, folder=folder)
            yield "trainer.entry", trainer.entry, find_module
    if trainer.is_executable:
        yield "trainer.entry", trainer.entry, partial(_problem_of_executable, folder=folder)
    elif not trainer.module and folder.is_dir():
        hint = (
            "" if trainer.folder else ", as trainer.folder is null: call the launcher in the "
            "folder that the entry is named from, or set trainer.folder"
        )  # fmt: skip

        def find_problem(entry: Path) -> str | None:
            problem = _problem_of_file(folder / entry)
            return f"in {folder} {problem}{hint}" if problem else None

        yield "trainer.entry", trainer.entry, find_problem


def _problem_of_module(name: Path) -> str | None:
    if find_spec(str(name).partition(".")[0]):
        return None
    return "is no module of this Python; allowed: modules that it has, and [] for none"


def _problem_of_entry(_: Path, module: str, folder: Path) -> str | None:
    top = module.partition(".")[0]
    if find_spec(top) or PathFinder.find_spec(top, [str(folder)]):
        return None
    return f"is no module of this Python, nor in {folder}; allowed: one that is, or trainer.python"


def _problem_of_executable(name: Path, folder: Path = Path()) -> str | None:
    # A name without a folder is looked for on PATH.
    found = shutil.which(name if len(name.parts) == 1 else folder / name)
    return None if found else "is no executable here; allowed: a program on PATH, or its path"


def _problem_of_model(folder: Path) -> str | None:
    lacks = "has no config.json; allowed: a folder as save_pretrained leaves it"
    return _problem_of_folder(folder) or (None if (folder / "config.json").is_file() else lacks)


def _problem_of_folder(folder: Path) -> str | None:
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        return None
    return f"{_what_is_at(folder)}; allowed: a folder that can be read"


def _problem_of_file(path: Path) -> str | None:
    if path.is_file() and os.access(path, os.R_OK):
        return None
    return f"{_what_is_at(path)}; allowed: a file that can be read"


def _what_is_at(path: Path) -> str:
    try:
        path.stat()
    except OSError as error:
        return f"cannot be found: {error.strerror}"
    if path.is_dir() or path.is_file():
        kind = "folder" if path.is_dir() else "file"
        return f"is a {kind}" + ("" if os.access(path, os.R_OK) else " that cannot be read")
    return "is neither a file nor a folder"
