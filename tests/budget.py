"""How long a test of `make test` may take, and which ones may take longer."""

from __future__ import annotations

import os
import time

from tests import code_budget

BUDGET_S = 20.0
OVER = {
    "tests/scenarios/first_run/test_first_run.py"
    "::test_the_first_run_learns_and_leaves_a_model_and_a_report": (
        "the recipe that the README has a newcomer run, all of its 200 steps"
    ),
    "tests/scenarios/slurm/test_run.py"
    "::test_submitted_recipe_trains_to_the_same_bits_as_on_this_machine": (
        "two whole runs of the launcher with real imports, one by a real Slurm"
    ),
}
"""Why a test takes longer than the budget, by its name. `tests/test_suite.py` counts them."""
_STEPS = 2_000_000
_QUIET_S = 0.12
_BUSY_S = 0.11
"""Of a processor for all steps, beside `make test` on the usual machine."""


def measure_slowness() -> float:
    """Return how much longer than on a quiet core of the usual machine a piece of work takes now.

    A test that is over its seconds is judged by its seconds through this number, taken when the
    test has ended: on a slow or a busy machine everything takes longer. Where the last minute had
    more processes that wanted to run than there are cores, it was as busy as that at least. Of a
    test that waits, not everything takes longer: such a machine lets it pass more easily.
    """
    begin_s = time.monotonic()
    value = 1
    for _ in range(_STEPS):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    now = (time.monotonic() - begin_s) / _QUIET_S
    return max(now, os.getloadavg()[0] / (os.cpu_count() or 1))


def measure_processor() -> float:
    """Return how much longer than usual a small piece of work takes the processor beside the tests.

    It counts no waiting for a processor, but what processes take from each other that share one.
    """
    begin_s = time.thread_time()
    value = 1
    for _ in range(_STEPS // 20):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return (time.thread_time() - begin_s) / _BUSY_S * 20


def judge_processors(seconds: float, slowness: float) -> list[str]:
    """Return what is wrong about the seconds of processors of all of `make test`."""
    limit_s = code_budget.read().processor_seconds[-1]
    # A faster machine takes fewer seconds by itself.
    if seconds / max(1.0, slowness) <= limit_s:
        return []
    words = f"make test took {seconds:.0f} s of processors {slowness:.2f} times as slow as usual"
    return [f"{words}; the limit of tests/budgets.yaml is {limit_s} s: make tests cheaper"]


def judge(name: str, seconds: float, slowness: float) -> str | None:
    """Return what is wrong about a test's seconds."""
    scaled_s = seconds / max(1.0, slowness)
    words = f"{name} took {seconds:.1f} s on a machine {slowness:.1f} times as slow as usual"
    if name not in OVER and scaled_s > BUDGET_S:
        return (
            f"{words}; the budget is {BUDGET_S:g} s: make it faster, mark it slow, or give a "
            "reason in tests/budget.py"
        )
    # Where another test has made what it compares with, and on a faster machine, it takes less.
    if name in OVER and seconds / min(1.0, slowness) < BUDGET_S / 8:
        return f"{words}, well below the budget of {BUDGET_S:g} s; take it out of tests/budget.py"
    return None


def missing(seen: set[str]) -> list[str]:
    """Return the listed tests that are no more among those of their function."""
    functions = {each.partition("[")[0] for each in seen}
    return sorted(each for each in OVER if each.partition("[")[0] in functions and each not in seen)
