"""Variables of the caller's environment that a Slurm job gets.

sbatch's --export with a list of names has the node load the user's login environment as well. A
slow profile then delays the job, what profiles export comes along, and some versions hold the job
where loading fails. So sbatch is called without all other variables. The script unsets them again,
for callers of sbatch that have them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase

from launcher.job import Job

_PASSED = "HOME LANG LC_* LMOD_* LOGNAME MODULE* PATH SHELL SLURM* SPANK_* TZ USER"
# Slurm sets these on the node, and bash its own.
_OF_NODE = (
    "CUDA_VISIBLE_DEVICES ENVIRONMENT GPU_DEVICE_ORDINAL HOSTNAME OLDPWD PWD ROCR_VISIBLE_DEVICES "
    "SHLVL TMPDIR ZE_AFFINITY_MASK _"
)
# sbatch reads these, and the script unsets them.
_OF_SBATCH = "LD_LIBRARY_PATH SBATCH_*"
# A run may need these.
_MISSED = "AWS_* HF_* LD_LIBRARY_PATH NCCL_* PYTHONPATH WANDB_* *_proxy"
_ENVIRONMENT_OPTIONS = frozenset({"export", "export-file", "get-user-env"})


def passed_on_node(job: Job) -> list[str]:
    """Return patterns of the variables that the script leaves set.

    There are none where `cluster.extra_options` says what sbatch passes on.
    """
    cluster = job.slurm
    if _ENVIRONMENT_OPTIONS.intersection(cluster.extra_options):
        return []
    exported = sorted(name for name, secret in cluster.secrets.items() if not secret.file)
    return [*_PASSED.split(), *_OF_NODE.split(), *exported]


def sbatch_environment(job: Job) -> tuple[dict[str, str], str]:
    """Return this process's environment without what the job does not get.

    With a note on what the job may miss of it, '' for nothing.
    """
    passed = passed_on_node(job)
    if not passed:
        return dict(os.environ), ""
    known = [*passed, *job.env, *job.cluster.secrets]
    missed = sorted(name for name in _find(_MISSED.split()) if name not in _find(known))
    kept = _find([name for name in passed if name not in _OF_NODE.split()] + _OF_SBATCH.split())
    note = (
        f"the job does not get {', '.join(missed)}, exported here; where the run needs one, add "
        "+cluster.secrets.NAME={} or +env.NAME=VALUE"
    )
    return {name: os.environ[name] for name in kept}, note if missed else ""


def _find(patterns: Sequence[str]) -> list[str]:
    return [name for name in os.environ if any(fnmatchcase(name, each) for each in patterns)]
