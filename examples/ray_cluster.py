"""Ray on the nodes of a run: the first is the head and runs an entry, the others are its workers.

    python ray_cluster.py ENTRY [ARGUMENT ...]

One of these runs on each node (`environment: none`). All nodes end when the entry has ended, and
the run ends as the entry did. The entry finds the cluster by `ray.init()`: RAY_ADDRESS is set.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import ray

RANK, NODES = int(os.environ["NODE_RANK"]), int(os.environ["NUM_NODES"])
ADDRESS = f"{os.environ['HEAD_ADDR']}:{os.environ['HEAD_PORT']}"
START_S, END_S, MISSED_MAX = 120.0, 30.0, 3


def start_ray(*words: str) -> subprocess.Popen[bytes]:
    """Start this node's part of Ray, which ends with the process that is returned."""
    return subprocess.Popen(["ray", "start", "--block", "--disable-usage-stats", *words])


def is_head_there() -> bool:
    """Return whether the head listens."""
    host, _, port = ADDRESS.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def end_ray(started: subprocess.Popen[bytes], within_s: float) -> None:
    """End this node's part of Ray; what is left of it then, the node's agent ends."""
    started.terminate()
    try:
        started.wait(within_s)
    except subprocess.TimeoutExpired:
        started.kill()


def wait_for_nodes(head: subprocess.Popen[bytes]) -> None:
    """Return when all nodes are there; ends the process where they do not come in time."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and head.poll() is None:
        try:
            ray.init(address=ADDRESS, log_to_driver=False)
        except ConnectionError:
            time.sleep(1.0)
            continue
        break
    while time.monotonic() < deadline_s and head.poll() is None:
        num_nodes = sum(each["Alive"] for each in ray.nodes()) if ray.is_initialized() else 0
        if num_nodes == NODES:
            ray.shutdown()
            return
        time.sleep(1.0)
    sys.exit(f"Ray's {NODES} nodes have not come within {START_S:.0f} s")


def run_head(entry: list[str]) -> int:
    """Start the head, wait for the workers, and run the entry; returns its status."""
    host, _, port = ADDRESS.rpartition(":")
    head = start_ray("--head", f"--node-ip-address={host}", f"--port={port}")
    try:
        wait_for_nodes(head)
        print(f"Ray has {NODES} nodes; the entry begins", flush=True)
        return subprocess.run(entry, env={**os.environ, "RAY_ADDRESS": ADDRESS}).returncode
    finally:
        end_ray(head, END_S)


def run_worker() -> int:
    """Belong to the head's cluster until that ends; the head says how the run has ended."""
    deadline_s = time.monotonic() + START_S
    while not is_head_there():
        if time.monotonic() > deadline_s:
            sys.exit(f"no head of Ray at {ADDRESS} within {START_S:.0f} s")
        time.sleep(1.0)
    worker, num_missed = start_ray(f"--address={ADDRESS}"), 0
    try:
        while worker.poll() is None and num_missed < MISSED_MAX:
            time.sleep(1.0)
            num_missed = 0 if is_head_there() else num_missed + 1
    finally:
        # Without a head it waits for one in vain.
        end_ray(worker, 2.0)
    # Where it ended by itself while the head is there, something is wrong with this node.
    return worker.returncode if num_missed == 0 else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python ray_cluster.py ENTRY [ARGUMENT ...]")
    sys.exit(run_worker() if RANK else run_head(sys.argv[1:]))
