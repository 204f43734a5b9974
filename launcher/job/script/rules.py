"""Rules about jobs that run a program of a user's. Nothing here reads anything but the job."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.job.content import JobContent
from launcher.job.fields import shown
from launcher.job.script.arguments import named_values
from launcher.job.workload import ScriptTrainer
from resilience.progress import find_problem

_WHERE = "trainer.kind 'script'"


def script_rules(job: JobContent) -> Iterator[str]:
    """Yield what a job with a program of a user's may not say."""
    if not isinstance(trainer := job.trainer, ScriptTrainer):
        return
    if job.model:
        yield (
            f"model.architecture {job.model.architecture!r} does not fit {_WHERE}, whose program "
            "brings its own model; allowed: null, so leave /model out"
        )
    if job.data:
        yield (
            f"data.kind {job.data.kind!r} does not fit {_WHERE}, whose program reads its own data; "
            "allowed: null, so leave /data out"
        )
    if job.resilience.elastic is not None:
        yield (
            f"resilience.elastic does not fit {_WHERE}, as it needs a trainer of ours; allowed: "
            "null, as resilience/elastic=null"
        )
    if job.resilience.checkpointless is not None:
        yield from _recovery(trainer)
    if (tiered := job.resilience.tiered) and not tiered.starts_memoryd:
        yield (
            f"resilience.tiered.backend {tiered.backend!r} does not fit {_WHERE}; allowed: "
            "'memoryd', or resilience/tiered=null"
        )
    yield from _entry(trainer)
    yield from _arguments(trainer)
    if problem := find_problem(trainer.progress):
        yield f"trainer.progress {problem}; allowed: names, and regular expressions of a step"
    if trainer.environment == "none" and trainer.processes_per_node not in (None, 1):
        yield (
            f"trainer.processes_per_node {trainer.processes_per_node} does not fit "
            "trainer.environment 'none', whose one process of a node starts the others; allowed: "
            "null"
        )


def _recovery(trainer: ScriptTrainer) -> Iterator[str]:
    """Yield why a program could not go on within a step, as resilience.protect lets it."""
    where = "does not fit resilience.checkpointless, which"
    if trainer.environment == "none":
        yield (
            f"trainer.environment 'none' {where} replaces single ranks; allowed: 'torchrun', or "
            "resilience/checkpointless=null"
        )
    if trainer.python or trainer.is_executable:
        name, value = "python", trainer.python
        if trainer.is_executable:
            name, value = "entry", trainer.entry
        yield (
            f"trainer.{name} {value!r} {where} forks a program from a process with its imports; "
            "allowed: a file of Python or -m MODULE, run by the cluster's Python"
        )


def _entry(trainer: ScriptTrainer) -> Iterator[str]:
    entry = trainer.entry
    if trainer.module is not None:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", trainer.module):
            yield f"trainer.entry {entry!r}: allowed behind -m: a module's name, as -m train.main"
    elif problem := find_entry_problem(entry):
        yield problem
    elif trainer.python and trainer.is_executable:
        yield (
            f"trainer.python {trainer.python!r} does not fit trainer.entry {entry!r}, an "
            "executable, which no Python reads; allowed: null"
        )


def find_entry_problem(entry: str) -> str | None:
    """Return why a file or executable cannot be an entry, None where it can."""
    if entry.isprintable() and not (re.search(r"\s", entry) or entry.startswith("-")):
        return None
    return (
        f"trainer.entry {entry!r}: allowed: a file as train.py, without blanks, -m and a module, "
        "or one executable; the words behind it go to trainer.arguments, as a list"
    )


def _arguments(trainer: ScriptTrainer) -> Iterator[str]:
    if isinstance(trainer.arguments, tuple) or trainer.argument_style == "--key value":
        return
    for name, value in named_values(trainer.arguments):
        if isinstance(value, tuple):
            yield (
                f"trainer.arguments.{name} {shown(list(value))} does not fit "
                f"trainer.argument_style {trainer.argument_style!r}, where an argument has one "
                "value; allowed: one text, or the style '--key value'"
            )
