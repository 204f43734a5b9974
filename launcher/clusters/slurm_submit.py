"""Hand a rendered script to sbatch."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher.clusters.slurm import JOB_SCRIPT
from launcher.clusters.submission import Submission, run_program
from launcher.errors import OutsideError


def submit_slurm(run_dir: Path) -> Submission:
    """Hand the rendered script in `run_dir` to sbatch; blocks until it has answered.

    Raises OutsideError with sbatch's own words. Every call submits another job.
    """
    command = ("sbatch", "--parsable", JOB_SCRIPT)
    output = run_program(command, run_dir)
    # "<job id>", or "<job id>;<cluster>" where there are several clusters.
    job_id = output.strip().partition(";")[0]
    if not job_id.isdecimal():
        raise OutsideError(f"{shlex.join(command)} printed no job id but {output.strip()!r}")
    return Submission(command=command, job_id=job_id, output=output)
