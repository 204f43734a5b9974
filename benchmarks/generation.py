"""Times a generation's opening: the agents' store beside torch's TCPStore.

    python -m benchmarks.generation [-n 10] [--ranks 16,32,64] [--resolver files]

No model. Ours: one agent, and in each generation the time from the first rank that is told of it
to the end of the first all-reduce on all ranks; rank 0 raises to bring about the next one. torch's:
as many processes open `env://` anew, with a new TCPStore each time. Those have torch's defaults; an
agent sets GLOO_ENABLE_STORE_V2_API. Names come from files alone; with `--resolver lost` each query
is counted and never answered. Medians with extremes, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine

LIMIT_S = 300.0


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=10, help="generations of each kind and size")
    parser.add_argument("--ranks", default="16,32,64", help="sizes, with commas")
    parser.add_argument("--resolver", choices=["files", "lost"], default="files")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    machine.add_arguments(parser)
    return parser.parse_args()


# ---- ours


def train_nothing() -> None:
    """Be a rank of ours: time each generation, and end the run after the last one."""
    import torch
    import torch.distributed as dist

    from resilience.comm.agent_store import AgentStore
    from resilience.comm.sockets import open_sockets
    from resilience.inprocess.block import reexecutable
    from resilience.inprocess.generation import Generation
    from resilience.state.report import Phase, Report, fresh_report

    folder, num_times = Path(os.environ["OUT"]), int(os.environ["NUM_TIMES"])
    begun: dict[int, tuple[float, float]] = {}
    times: list[dict[str, float]] = []
    own: list[Any] = []
    num_bytes: list[int] = []
    multi_get = AgentStore.multi_get

    def count(store: AgentStore, keys: Sequence[str]) -> list[bytes]:
        values = multi_get(store, keys)
        num_bytes.append(sum(map(len, values)))
        return values

    setattr(AgentStore, "multi_get", count)  # noqa: B010 - gloo calls it by this name

    def begin(generation: Generation) -> None:
        begun[generation.number] = time.monotonic(), time.process_time()
        own[:] = [generation.layout]
        num_bytes.clear()

    def block(generation: Generation) -> None:
        dist.all_reduce(torch.ones(1))
        begun_s, spent_s = begun[generation.number]
        own_times = {
            "number": generation.number,
            "begun_s": begun_s,
            "ended_s": time.monotonic(),
            "cpu_s": time.process_time() - spent_s,
            "sockets": len(open_sockets()),
            "bytes": sum(num_bytes),
        }
        times.append(own_times)
        dist.barrier()
        if len(times) <= num_times:
            if generation.rank == 0:
                time.sleep(0.2)
                raise RuntimeError("the next one")
            dist.recv(torch.ones(1), 0)
        (folder / f"rank-{generation.rank}.json").write_text(json.dumps(times))

    def report(*, rank: int, node: str, generation: int) -> Report:
        fresh = fresh_report(own[0], rank, generation)
        return replace(fresh, phase=Phase.COMPUTING, step=generation + 1)

    reexecutable(block, report=report, enter=begin)()


def measure_ours(ranks: int, num_times: int, folder: Path) -> list[list[dict[str, float]]]:
    """Return what each rank has measured in each generation after the first."""
    command = [
        *(sys.executable, "-m", "resilience.agent", "--nproc-per-node", str(ranks)),
        *("--run-dir", str(folder / "run"), "--spares", "0", "--rdzv-id", "g"),
        *("--", "-m", "benchmarks.generation", "rank"),
    ]
    variables = {**os.environ, "OUT": str(folder), "NUM_TIMES": str(num_times)}
    done = subprocess.run(command, check=False, env=variables, timeout=LIMIT_S, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode()[-2000:])
    found: dict[float, list[dict[str, float]]] = {}
    for path in folder.glob("rank-*.json"):
        for each in json.loads(path.read_text()):
            found.setdefault(each["number"], []).append(each)
    return [found[number] for number in sorted(found) if len(found[number]) == ranks][1:]


def time_ours(ranks: int, num_times: int, folder: Path) -> list[float]:
    """Return how long each generation after the first has taken to open, in seconds."""
    return [
        max(each["ended_s"] for each in one) - min(each["begun_s"] for each in one)
        for one in measure_ours(ranks, num_times, folder)
    ]


# ---- torch's


def open_env(rank: int, ranks: int, ports: list[int], gate: Any, times: Any) -> None:
    """Be a rank of torch's: open a group at each port, one after the other."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        gate.wait()
        begun_s = time.monotonic()
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        times.put((port, begun_s, time.monotonic()))
        dist.barrier()
        dist.destroy_process_group()


def time_torchs(ranks: int, num_times: int) -> list[float]:
    """Return how long each opening has taken after the first, in seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_times + 1)]
    ports = [each.getsockname()[1] for each in with_sockets]
    for each in with_sockets:
        each.close()
    gate, times = context.Barrier(ranks), context.Queue()
    processes = [
        context.Process(target=open_env, args=(rank, ranks, ports, gate, times))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, list[tuple[float, float]]] = {}
    for _ in range(ranks * len(ports)):
        port, begun_s, ended_s = times.get(timeout=LIMIT_S)
        found.setdefault(port, []).append((begun_s, ended_s))
    for process in processes:
        process.join()
    rows = [found[port] for port in ports]
    return [max(each[1] for each in one) - min(each[0] for each in one) for one in rows][1:]


def show(name: str, ranks: int, times: list[float]) -> None:
    """Print one line."""
    middle, low, high = (1000 * f(times) for f in (statistics.median, min, max))
    print(f"{ranks:3d} ranks  {name:6s} {middle:7.0f} ms  ({low:.0f}-{high:.0f}, n={len(times)})")


def run_inside(resolver: str) -> int:
    """Run this again where names come from files alone, or from a resolver that never answers.

    Prints how many queries that one has got; needs root and util-linux's unshare.
    """
    files = {"/etc/nsswitch.conf": f"hosts: {'files' if resolver == 'files' else 'dns'}\n"}
    if resolver == "lost":
        files["/etc/resolv.conf"] = "nameserver 127.0.0.1\n"
    with tempfile.TemporaryDirectory() as folder, socket.socket(type=socket.SOCK_DGRAM) as lost:
        mounts = []
        for number, (path, text) in enumerate(files.items()):
            (Path(folder) / str(number)).write_text(text)
            mounts.append(f"mount --bind {folder}/{number} {path} && ")
        if resolver == "lost":
            lost.bind(("127.0.0.1", 53))
        words = [sys.executable, "-m", "benchmarks.generation", *sys.argv[1:], "--inside"]
        script = "".join(mounts) + shlex.join(words)
        status = subprocess.run(["unshare", "-m", "sh", "-c", script], check=False).returncode
        lost.settimeout(0)
        num_queries = 0
        with suppress(BlockingIOError, OSError):
            while lost.recv(2048):
                num_queries += 1
        if resolver == "lost":
            print(f"queries to the resolver: {num_queries}")
        return status


def main() -> None:
    """Time both at each size, in turns; with a resolver that never answers ours alone."""
    arguments = parse_arguments()
    if not arguments.inside:
        machine.check_load(arguments)
        raise SystemExit(run_inside(arguments.resolver))
    for ranks in map(int, arguments.ranks.split(",")):
        folder = Path(tempfile.mkdtemp(prefix="generation-"))
        ours = time_ours(ranks, arguments.n, folder)
        shutil.rmtree(folder)
        show("ours", ranks, ours)
        if arguments.resolver == "files":
            torchs = time_torchs(ranks, arguments.n)
            show("torch", ranks, torchs)
            ratio = statistics.median(ours) / statistics.median(torchs)
            print(f"          ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    train_nothing() if sys.argv[1:2] == ["rank"] else main()
