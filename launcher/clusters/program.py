"""The program that a node's workers run, in the words that its agent is given after `--`. Pure."""

from __future__ import annotations

import shlex

from launcher.job import Job
from launcher.job.script.arguments import argument_words
from launcher.job.workload import ScriptTrainer
from resilience.node_config import ProgramConfig

_PRELOADED = "resilience"
"""For every script: with a module that is named, the agent imports no others of its own choice."""


def script_words(trainer: ScriptTrainer, python: str) -> tuple[str, ...]:
    """Return the shell words that start a user's program, by the cluster's Python or its own.

    {node_rank} and its like stay as they are: the agent of each node fills them in.
    """
    words = argument_words(trainer.arguments, trainer.argument_style, trainer.boolean_style)
    entry = ["-m", trainer.module] if trainer.module is not None else [trainer.entry]
    own = () if trainer.is_executable else (_interpreter(trainer, python),)
    return (*own, *map(shlex.quote, [*entry, *words]))


def _interpreter(trainer: ScriptTrainer, python: str) -> str:
    return shlex.quote(trainer.python) if trainer.python else python


def preloads(job: Job) -> tuple[str, ...]:
    """Return the modules that import what the job's workers need."""
    trainer = job.trainer
    if isinstance(trainer, ScriptTrainer):
        return (_PRELOADED, *trainer.preload)
    if trainer.kind == "torch":
        return ("recipes_training.preload",)
    is_cpu = job.instance.accelerator == "cpu"
    module = (
        "recipes_training.megatron.preload_cpu" if is_cpu else "recipes_training.megatron.trainer"
    )
    return (module, "recipes_training.recovery")


def program_config(job: Job) -> ProgramConfig | None:
    """Return what agents are told of a user's program, None where the program is one of ours."""
    trainer = job.trainer
    if not isinstance(trainer, ScriptTrainer):
        return None
    return ProgramConfig(
        executed=trainer.python is not None or trainer.is_executable,
        folder=trainer.folder,
        alone=trainer.environment == "none",
        progress=trainer.progress,
        hang_deadline_s=trainer.hang_deadline_s,
    )
