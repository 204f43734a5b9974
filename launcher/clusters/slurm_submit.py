"""Hand a rendered script to sbatch."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher.clusters.passed import sbatch_environment
from launcher.clusters.slurm import JOB_SCRIPT
from launcher.clusters.submission import Submission, run_program
from launcher.errors import OutsideError
from launcher.job import Job


def submit_slurm(run_dir: Path, job: Job) -> Submission:
    """Hand the rendered script in `run_dir` to sbatch; blocks until it has answered.

    sbatch gets the variables of this process that `passed` names. Raises OutsideError with
    sbatch's own words. Every call submits another job.
    """
    command = ("sbatch", "--parsable", JOB_SCRIPT)
    environment, note = sbatch_environment(job)
    output = run_program(command, run_dir, environment=environment)
    # "<job id>", or "<job id>;<cluster>" where there are several clusters.
    job_id = output.strip().partition(";")[0]
    if not job_id.isdecimal():
        raise OutsideError(f"{shlex.join(command)} printed no job id but {output.strip()!r}")
    return Submission(command=command, job_id=job_id, output=output, warning=note)
