"""Step time of a run under a flood of connections at one of its doors.

    python -m benchmarks.floods [--rounds 10] [--seconds 5] [--rate 500] [--cases plain,tls,http]

A run of llama3_tiny_checkpointless on two nodes of one worker, with checkpoint daemons, trains on
this machine. Windows without a flood, under one at a closed port and under one at each door take
turns, in another order each round. Every connection of a flood says nothing, half of a line, a
whole wrong line or TLS's first words, and stays until 200 later ones have come. Ratios are of
windows of one round, with quartiles. The bar: steps under a flood at a door are at most 1.05 times
as long as under one at a closed port. Processor time of all the run's processes for each step tells
the same on a busy machine. The HTTP door is that of a run of one node, since two nodes of one
machine cannot open the same port.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import re
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks import machine
from benchmarks.jobplan import RUN_DIR_VARIABLE
from benchmarks.processes import end_processes, find_processes
from launcher.clusters.running.memory import remove_arenas
from resilience.event_files import EVENTS_NAME
from resilience.events import read_events

_HTTP_PORT = 29200
_HTTP = (
    "resilience.tiered.ram.replicas=0",
    "resilience.tiered.ram.domains_min=1",
    f"resilience.tiered.http_port={_HTTP_PORT}",
)
_CASES = {"plain": (2, ()), "tls": (2, ("cluster.tls=true",)), "http": (1, _HTTP)}
_DOORS = {
    "agent's door": r"--rdzv-endpoint=[^,\0]*:(\d+)",
    "daemon's door": r"--peer-listen=[^,\0]*:(\d+)",
}
_UNITS = ("ms a step", "ms of processors a step")
_OPEN_MAX = 200
_TICK_S = 0.01
_WARM_STEPS = 50


def first_words() -> list[bytes]:
    """Return what the connections of a flood say."""
    said = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="x").do_handshake()
    return [b"", b"agent", b"daemon 2" + bytes(48), said.read()]


def flood(port: int, rate: int) -> None:
    """Open connections until the process is ended."""
    waiting: deque[socket.socket] = deque()
    words, began_s = itertools.cycle(first_words()), time.monotonic()
    for tick in itertools.count(1):
        for _ in range(round(rate * _TICK_S)):
            waiting.append(each := socket.socket())
            each.setblocking(False)  # noqa: FBT003
            with suppress(OSError):
                each.connect_ex(("127.0.0.1", port))
                each.send(next(words))
            if len(waiting) > _OPEN_MAX:
                waiting.popleft().close()
        time.sleep(max(0.0, began_s + tick * _TICK_S - time.monotonic()))


@contextmanager
def training(folder: Path, num_nodes: int, words: tuple[str, ...]) -> Iterator[Path]:
    """Have a run train; yields its folder."""
    run = folder / "run"
    words = (
        "recipe=llama/llama3_tiny_checkpointless", "resilience.faults.injected=[]",
        "resilience/tiered=ram", f"trainer.num_nodes={num_nodes}",
        f"trainer.num_devices={2 // num_nodes}", "trainer.max_steps=1000000",
        "trainer.log_every_n_steps=1", "action=run", "run.detach=true", f"run.dir={run}", *words,
    )  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        env={**os.environ, RUN_DIR_VARIABLE: str(run)}, check=True, capture_output=True,
    )  # fmt: skip
    try:
        while len(step_times(run, 0.0)) < _WARM_STEPS:
            time.sleep(1)
        yield run
    finally:
        end_processes(str(run))
        remove_arenas(run)


def step_times(run: Path, since_s: float) -> list[float]:
    """Return how long the steps took that ended since then, in ms."""
    return [
        1000 * event.fields["duration_s"]
        for event in read_events(run / EVENTS_NAME)
        if event.event == "step" and event.fields.get("duration_s") and event.time > since_s
    ]


def cpu_seconds(run: Path) -> float:
    """Return the processor time that the run's processes have taken."""
    words = (Path(f"/proc/{pid}/stat").read_text().split() for pid in find_processes(str(run)))
    return sum(int(each[13]) + int(each[14]) for each in words) / os.sysconf("SC_CLK_TCK")


def measure(run: Path, ports: dict[str, int], given: argparse.Namespace) -> None:
    """Print the median of each window's steps, and each door's ratio to the closed port."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(given.rounds):
        for name in random.Random(number).sample(sorted(ports), len(ports)):
            flooding = multiprocessing.Process(target=flood, args=(ports[name], given.rate))
            if ports[name]:
                flooding.start()
            began_s, began_cpu_s = time.time(), cpu_seconds(run)
            time.sleep(given.seconds)
            steps, cpu_s = step_times(run, began_s), cpu_seconds(run) - began_cpu_s
            found[name].append((statistics.median(steps), 1000 * cpu_s / len(steps)))
            if ports[name]:
                flooding.kill()
    for name, windows in found.items():
        print(f"  {name}:", end="")
        closed = zip(*found["closed port"], strict=True)
        for unit, values, others in zip(_UNITS, zip(*windows, strict=True), closed, strict=True):
            ratios = [a / b for a, b in zip(values, others, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ratio = f"{middle:.3f} ({low:.3f} to {high:.3f}) of the closed port"
            print(f" {statistics.median(values):.1f} {unit}, {ratio};", end="")
        print(f" n {len(windows)}", flush=True)


def find_doors(run: Path) -> dict[str, int]:
    """Return the ports of the first agent and the first daemon."""
    processes = [Path(f"/proc/{pid}/cmdline").read_text() for pid in find_processes(str(run))]
    found = {name: re.search(sign, "".join(processes)) for name, sign in _DOORS.items()}
    return {name: int(port[1]) for name, port in found.items() if port}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--rate", type=int, default=500, help="connections a second")
    parser.add_argument("--cases", default=",".join(_CASES))
    machine.add_arguments(parser)
    given = parser.parse_args()
    machine.check_load(given)
    for case in given.cases.split(","):
        num_nodes, words = _CASES[case]
        with tempfile.TemporaryDirectory() as folder, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            ports = {"no flood": 0, "closed port": closed.getsockname()[1]}
            with training(Path(folder), num_nodes, words) as run:
                print(f"{case}:", flush=True)
                doors = find_doors(run) if num_nodes > 1 else {"HTTP door": _HTTP_PORT}
                measure(run, ports | doors, given)


if __name__ == "__main__":
    main()
