"""The seam for this project's own recovery in the fault benchmarks.

To fill in: `start(plan)` starts `plan.num_ranks` workers that train the job of
benchmarks/recovery_peers/job.py and returns at once an object with `poll()` and `end()`
(`benchmarks.faultbench.RunningJob`; `benchmarks.processes.ProcessJob` is one). Every process
must get `benchmarks.faultbench.job_environment(plan)`, by which the frame finds it again. A
worker

* takes its batches from `job.draw_batch(rank, step, plan.num_ranks)`,
* calls `FaultInjector(plan, log).fire(rank, step)` in every step between forward and backward;
  an injector is made anew whenever a process enters its training loop,
* writes with `EventLog(plan.run_dir)`: `committed` (step, loss=job.loss_bits(...), world) after
  each update, `restored` (step) with the step it goes on with whenever it takes back a state,
  and at the end `finished` (digest=job.state_digest(...)), after which it leaves,
* trains to `plan.num_steps`; a run of goodput has no such end and is ended from outside.

`job` needs transformers and xxhash; the Python of the peers (`benchmarks.peers.PYTHON`) has
them, together with the same torch that the peers use.
"""

from __future__ import annotations

from benchmarks.faultbench import RunningJob, System
from benchmarks.jobplan import JobPlan


def start(plan: JobPlan) -> RunningJob:
    """Start a job under this project's recovery."""
    raise NotImplementedError(f"nothing here yet that could run {plan.run_dir}")


def why_missing() -> str | None:
    """Return why ours cannot run here, or None; the stub is found out by starting it."""
    return None


OURS = System(
    name="ours",
    what="this project: recovery in the process, state from a live replica",
    start=start,
    missing=why_missing,
)
