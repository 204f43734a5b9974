"""Jobs that a real Slurm runs with the real agent, and stand-ins for the workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.scenarios.slurm.jobs import Run, Slurm, submit_run

# The agent runs `python -m training` in the run's folder, so this file there comes first.
WORKER = """\
import json, os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]

def stop(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1)  # a worker ends its step first
    Path(f"stopped-{rank}").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
content = {"words": sys.argv[1:], **{name: os.environ[name] for name in names}}
partial = Path(f"partial-{rank}")
partial.write_text(json.dumps(content))
partial.rename(f"worker-{rank}.json")
while True:
    signal.pause()
"""


def prepare(folder: Path) -> None:
    folder.mkdir()
    (folder / "training").mkdir()
    (folder / "training" / "__main__.py").write_text(WORKER)
    for name in ("__init__.py", "preload.py"):
        (folder / "training" / name).touch()


@pytest.fixture
def run(slurm: Slurm, tmp_path: Path) -> Run:
    values = {"cluster": {"python": sys.executable, "rdzv_host": "127.0.0.1"}}
    return submit_run(slurm, tmp_path / "run", values, prepare)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["scancel"], id="cancelled"),
        pytest.param(["scancel", "--signal=TERM"], id="ahead-of-the-time-limit"),
        pytest.param(["scancel", "--batch", "--signal=USR1"], id="told-through-the-script"),
    ],
)
def test_every_worker_has_a_rank_and_may_end_its_step_when_asked_to_stop(
    slurm: Slurm, run: Run, command: list[str]
):
    workers = [json.loads(path.read_text()) for path in run.wait_for("worker-*.json", 4)]

    slurm.ask(*command, run.job_id)

    assert [worker["RANK"] for worker in workers] == ["0", "1", "2", "3"]
    assert [worker["LOCAL_RANK"] for worker in workers] == ["0", "1", "0", "1"]
    assert {worker["WORLD_SIZE"] for worker in workers} == {"4"}
    nodes = [worker["words"][-1] for worker in workers]
    assert len(set(nodes)) == 2
    assert nodes[0] == nodes[1]
    assert len(run.wait_for("stopped-*", 4)) == 4
    assert run.end() in {"CANCELLED", "FAILED"}
