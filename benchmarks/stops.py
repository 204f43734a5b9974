"""Stop a run without recovery at random moments, continue it, and compare its bits.

    python -m benchmarks.stops [-n STOPS] [--seed SEED]

Four workers on two nodes of this machine; sharding none, full and hybrid in turn. Each stop is one
SIGINT to a run of its own, which `launcher continue` takes to the end. What is compared with an
undisturbed run: loss and gradient norm of every step, and the bytes of the exported weights.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resilience.events import read_events

_STEPS = 60
_SHARDINGS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "full": ("trainer.sharding=full",),
    "hybrid": ("trainer.sharding=hybrid", "trainer.num_replicas=2"),
}
_WAITS_S = 120.0
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss and gradient norm of each step of a run, its files of weights, and its stop."""

    steps: Mapping[int, tuple[str, str]]
    weights: Mapping[str, bytes]
    stopped_after: int | None = None


def main() -> int:
    """Print a line for each stop; return 1 where one had other bits or lost a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20, help="stops (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    args = parser.parse_args()
    moments = random.Random(args.seed)
    held = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calm = {each: _run(folder, f"calm-{each}", each, None) for each in _SHARDINGS}
        for number in range(args.n):
            sharding = tuple(_SHARDINGS)[number % len(_SHARDINGS)]
            found = _run(folder, f"run-{number}", sharding, moments)
            is_same = (found.steps, found.weights) == (calm[sharding].steps, calm[sharding].weights)
            held += is_same
            word = "same bits" if is_same else "OTHER BITS"
            sys.stdout.write(f"{sharding}, stopped after {found.stopped_after} steps: {word}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{held} of {args.n} held (seed {args.seed})\n")
    return 0 if held == args.n else 1


def _run(folder: Path, name: str, sharding: str, moments: random.Random | None) -> Outcome:
    words = (*_SHARDINGS[sharding], f"trainer.max_steps={_STEPS}", "action=run", f"run.name={name}")
    stopped_after = None
    if moments is None:
        _launch(folder, "recipe=llama/llama3_tiny_pretrain", *words)
    else:
        stopped_after = _stop(folder, moments.randrange(1, _STEPS - 5), name, words)
        _launch(folder, "continue", name)
    run_dir = folder / "runs" / name
    files = (run_dir / "checkpoint").glob("*.safetensors")
    weights = {path.name: path.read_bytes() for path in files}
    if not weights:
        raise RuntimeError(f"{run_dir} has no weights")
    return Outcome(_read_steps(run_dir), weights, stopped_after)


def _stop(folder: Path, step: int, name: str, words: tuple[str, ...]) -> int:
    """Send SIGINT once so many steps were taken; return how many it took."""
    command = [sys.executable, "-m", "launcher", "recipe=llama/llama3_tiny_pretrain", *words]
    run_dir, until_s = folder / "runs" / name, time.monotonic() + _WAITS_S
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while time.monotonic() < until_s and len(_read_steps(run_dir)) < step:
            time.sleep(_PAUSE_S)
        process.send_signal(signal.SIGINT)
    return len(_read_steps(run_dir))


def _read_steps(run_dir: Path) -> dict[int, tuple[str, str]]:
    """Return the bits of each step; a step that was told twice was the same."""
    found: dict[int, tuple[str, str]] = {}
    log = run_dir / "events.jsonl"
    for each in read_events(log) if log.exists() else ():
        if each.event == "step" and each.step is not None:
            bits = (float(each.fields["loss"]).hex(), float(each.fields["grad_norm"]).hex())
            if found.setdefault(each.step, bits) != bits:
                raise RuntimeError(f"{run_dir}: step {each.step} has two values")
    return found


def _launch(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "launcher", *words]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr}")


if __name__ == "__main__":
    raise SystemExit(main())
