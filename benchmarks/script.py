"""A program of one's own under a recipe and under torchrun: its steps, and how soon it goes on.

    python -m benchmarks.script steps -n 1000   steps of 100 ms, one here and one there in turn
    python -m benchmarks.script kill -n 5       from SIGKILL of a rank to the next step

Four workers of one node. Under the recipe the steps are taken without and with `resilience.log`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SYSTEMS = ("recipe", "torchrun")
NUM_RANKS, STEP_S, WAIT_S = 4, 0.09, 120.0


def work(folder: Path, name: str, pairs: int, logs: str) -> None:
    """Train; rank 0 notes when each step began and ended, in turn with the other system's."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import resilience

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"{name}-pid-{rank}").write_text(str(os.getpid()))
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with (folder / "turn").open("r+b") as file:
        turn = mmap.mmap(file.fileno(), 1)
    for step in range(pairs or 1_000_000):
        while pairs and rank == 0 and SYSTEMS[turn[0]] != name:
            time.sleep(0.0002)
        dist.barrier()
        begin_s = time.monotonic()
        time.sleep(STEP_S)
        loss = model(torch.randn(32, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if logs == "log" and name == SYSTEMS[0]:
            resilience.log(step + 1, loss, lr=1e-3)
        dist.barrier()
        if rank == 0:
            with (folder / f"{name}-steps").open("a") as notes:
                notes.write(f"{begin_s} {time.monotonic()}\n")
            turn[0] = 1 - SYSTEMS.index(name)
    dist.destroy_process_group()


def start(folder: Path, name: str, pairs: int, logs: str) -> subprocess.Popen[bytes]:
    """Start the program under a system."""
    words = ["work", str(folder), name, str(pairs), logs]
    if name == "torchrun":
        command = [
            "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}", "--max-restarts=1000",
            "--monitor-interval=0.1", "--standalone", "-m", "benchmarks.script", *words,
        ]  # fmt: skip
    else:
        trainer = {"num_nodes": 1, "num_devices": NUM_RANKS, "max_restarts": 99, "arguments": words,
                   "entry": "-m benchmarks.script", "folder": str(Path.cwd())}  # fmt: skip
        recipe = {"recipe": {"name": "script", "version": 1, "schema": 1, "description": "steps"},
                  "defaults": [{"/trainer": "script"}, {"/instance": "cpu"}, "_self_"]}  # fmt: skip
        text = json.dumps({**recipe, "trainer": trainer})
        (folder / "script.yaml").write_text(f"# @package _global_\n{text}\n")
        run = ["action=run", f"run.dir={folder}/run", "oversubscribe=true"]
        command = ["launcher", f"recipe={folder}/script.yaml", *run]
    log = (folder / f"{name}.log").open("wb")
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                 "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # fmt: skip
    return subprocess.Popen([sys.executable, "-m", *command], env=variables, stdout=log, stderr=log)


def read_steps(folder: Path, name: str) -> list[tuple[float, float]]:
    """Return when each step began and ended."""
    path = folder / f"{name}-steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(begin), float(end)) for begin, end in map(str.split, lines)]


def compare_steps(pairs: int, logs: str) -> None:
    """Print how much longer a step takes under the recipe, with its interval by pairs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "turn").write_bytes(b"\0")
        for each in [start(folder, each, pairs, logs) for each in SYSTEMS]:
            assert each.wait() == 0, folder
        ours, theirs = (
            [end - begin for begin, end in read_steps(folder, each)] for each in SYSTEMS
        )
    more = [100 * (a - b) / statistics.mean(theirs) for a, b in zip(ours, theirs, strict=True)]
    mean, half = statistics.mean(more), 1.96 * statistics.stdev(more) / pairs**0.5
    step_ms = 1000 * statistics.median(theirs)
    print(f"{logs}: {step_ms:.1f} ms under torchrun, {mean:+.2f} % +- {half:.2f}, n = {pairs}")


def wait_for_step(folder: Path, name: str, after_s: float) -> float:
    """Return when the first step has ended that began later; it has some minutes to come."""
    while not (found := [end for begin, end in read_steps(folder, name) if begin > after_s]):
        time.sleep(0.01)
        assert time.monotonic() - after_s < WAIT_S, (folder / f"{name}.log").read_text()
    return found[0]


def compare_kills(kills: int) -> None:
    """Print how long after SIGKILL of a rank the next step has been taken."""
    for name in SYSTEMS:
        with tempfile.TemporaryDirectory() as path:
            folder, took = Path(path), []
            (folder / "turn").write_bytes(b"\0")
            started = start(folder, name, 0, "none")
            for _ in range(kills):
                wait_for_step(folder, name, time.monotonic() + 2.0)
                killed_s = time.monotonic()
                os.kill(int((folder / f"{name}-pid-1").read_text()), signal.SIGKILL)
                took.append(wait_for_step(folder, name, killed_s + STEP_S) - killed_s)
            started.send_signal(signal.SIGINT)
            started.wait(WAIT_S)
        span = f"({min(took):.2f}-{max(took):.2f})"
        print(f"{name}: {statistics.median(took):.2f} s {span}, n = {kills}")


def main() -> None:
    """Measure what is asked for."""
    if sys.argv[1:2] == ["work"]:
        work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["steps", "kill"])
    parser.add_argument("-n", type=int, default=5, help="pairs or kills (default 5)")
    options = parser.parse_args()
    if options.what == "kill":
        compare_kills(options.n)
    else:
        for logs in ("none", "log"):
            compare_steps(options.n, logs)


if __name__ == "__main__":
    main()
