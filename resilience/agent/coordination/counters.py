"""How often a run may be broken before it ends for it. Pure."""

from __future__ import annotations

from dataclasses import replace

from resilience.agent.coordination.membership import GAVE_UP_STATUS, State
from resilience.comm.messages import End
from resilience.state.report import Phase


def count(state: State, now_s: float) -> State:
    """Count generations that ended without a step, and replacements in the window."""
    window_s = state.options.restart_window_s
    restarts_s = tuple(at for at in state.restarts_s if now_s - at < window_s)
    steps = [
        each.step + (each.phase is Phase.PASSED)
        for each in state.reports.values()
        if each.phase is not Phase.FRESH
    ]
    step = max(steps, default=state.last_step)
    if state.first_failure is None or step > state.last_step:
        return replace(
            state, restarts_s=restarts_s, last_step=step, num_without_progress=0, in_process={}
        )
    # A fallback has taken the run back: what it does from there on is progress.
    return replace(
        state,
        restarts_s=restarts_s,
        last_step=step,
        num_without_progress=state.num_without_progress + 1,
    )


def _find_problem(state: State) -> str | None:
    options, failed = state.options, state.first_failure
    last = f"; the last fault: rank {failed.rank}: {failed.text}" if failed else ""
    if state.num_without_progress > options.restarts_without_progress_max:
        return (
            f"{state.num_without_progress} faults without a committed step between them, allowed "
            f"are {options.restarts_without_progress_max} (restarts_without_progress_max); mend "
            f"what comes back at once{last}"
        )
    if len(state.restarts_s) > options.restarts_max:
        return (
            f"{len(state.restarts_s)} replacements within {options.restart_window_s:g} s, "
            f"allowed are {options.restarts_max} (restarts_max); look for what they have in "
            f"common, or allow more{last}"
        )
    return None


def find_end(state: State) -> End | None:
    """Return how the run ends instead of another generation, None where it may have one."""
    if state.options.recovers:
        problem = _find_problem(state)
        return End(status=GAVE_UP_STATUS, reason=problem) if problem else None
    # The number of a generation is that of the restarts before it, whoever coordinates.
    if state.generation < max(0, state.options.restarts_max):
        return None
    failed = state.first_failure
    text = failed.text if failed else "the coordinator was lost"
    if allowed := state.options.restarts_max:
        restarts, are = (
            ("the 1 restart", "is") if allowed == 1 else (f"the {allowed} restarts", "are")
        )
        text += f"; {restarts} that --max-restarts allows {are} used up"
    return End(status=failed.status if failed else 1, reason=text)
