"""Stands in for a node's agent: writes down how it was started, then does what STAND_IN says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

node = os.environ["SLURMD_NODENAME"]
restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
does = os.environ["STAND_IN"]


def stop(number, frame):
    # The first agent to end has Slurm ask the others again, and an interpreter that is ending takes
    # its handlers away.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"stopped-{restart}-{node}").write_text(signal.Signals(number).name)
    sys.exit(5)


signal.signal(signal.SIGTERM, stop)
sys.stdout.write(f"agent of {node} start {restart}\n")
sys.stdout.flush()
partial = Path(f"partial-{node}")
env = dict(os.environ)
if "FROM_FILE" in env:
    env["FROM_FILE"] = f"<{len(env['FROM_FILE'])} characters>"
content = {"words": sys.argv[1:], "env": env, "folder": str(Path.cwd())}
partial.write_text(json.dumps({"node": node, **content}))
partial.rename(f"seen-{restart}-{node}.json")

if does == "outlast the limit":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["SLURM_NODEID"] == "0":
        record = {"time": 1.0, "node": node, "rank": 0, "generation": 1, "step": 10}
        record |= {"event": "checkpoint_saved", "fields": {}}
        with Path(f"events-{node}.jsonl").open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    if restart:
        sys.exit(0)
if does == "fail on the second node" and os.environ["SLURM_NODEID"] == "1":
    # The step ends with this, so every other agent has to be there by then.
    deadline = time.monotonic() + 60
    while len(list(Path().glob("seen-0-*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(7)
if does == "die on the second node":
    if os.environ["SLURM_NODEID"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    # Slurm would have ended this one within the time, were it to end it at all.
    signal.sigtimedwait([], 3)
    rank = int(os.environ["SLURM_NODEID"])
    for number in (rank, rank + 1):
        record = {"time": 1.0, "node": node, "rank": number, "generation": 1, "step": None}
        record |= {"event": "worker_finished", "fields": {}}
        with Path(f"events-{node}.jsonl").open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    sys.exit(0)
if does == "count how often it is asked":
    # Until a while after the first time: the second would come at once.
    num_asked = 0
    asked = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    wait_s: float = 600
    while signal.sigtimedwait(asked, wait_s):
        num_asked, wait_s = num_asked + 1, 2
        Path(f"asked-{node}").write_text(str(num_asked))
    sys.exit(143)
if does == "finish" or (does == "finish when restarted" and restart):
    sys.exit(0)
if does == "as told":
    while not Path("told").exists():
        time.sleep(0.05)
    # As above: Slurm asks who ends a little later than the first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.write("the reason\n")
    sys.exit(int(Path("told").read_text()))
while True:
    signal.pause()
