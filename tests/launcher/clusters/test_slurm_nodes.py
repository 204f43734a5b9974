"""What a node has to have before its workers start, and whose name a refusal has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher.clusters.test_slurm import TINY, run_script, script, write_program

GPUS = {"instance.accelerator": "gpu", "instance.type": "ours", "trainer.num_devices": 2}
EFA = GPUS | {"instance.num_efa": 2}
LISTED = "GPU 0: NVIDIA (UUID: GPU-a)\nGPU 1: NVIDIA (UUID: GPU-b)\n"
ANYTHING = "true"


class Nodes:
    """The nodes a and b, of which b has what a test gives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._devices = folder / "devices"

    def give_efa(self, number: int) -> None:
        for index in range(number):
            (self._devices / f"rdma{index}/device").mkdir(parents=True)
            (self._devices / f"rdma{index}/device/vendor").write_text("0x1d0f\n")

    def run(self, values: dict[str, Any], listed: str = LISTED, before: str = ANYTHING) -> str:
        """Run the script, `before` first on each node; return what the job's own log has."""
        text = script(TINY, **values).replace("/sys/class/infiniband", str(self._devices))
        text = text.replace("  local run_dir=$1", f"  {before}\n  local run_dir=$1", 1)
        tools = self.folder / "tools"
        tools.mkdir()
        write_program(tools / "nvidia-smi", f"printf '%s' '{listed}'")
        agent = 'ulimit -Sn >"files-$SLURMD_NODENAME"; touch "agent-$SLURMD_NODENAME"'
        write_program(tools / "python", agent)
        before_path = f'PATH={tools}:"$PATH"'
        text = text.replace("set -euo pipefail", f"set -euo pipefail\n{before_path}", 1)
        return run_script(text, self.folder, "a,b", STEP_NODES="a,b").stderr

    def log(self, node: str) -> str:
        (path,) = (self.folder / "logs").glob(f"*.{node}.log")
        return path.read_text()

    def has_agent(self, node: str) -> bool:
        return (self.folder / f"agent-{node}").exists()


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_node_that_has_all_of_it_starts_its_agent(nodes: Nodes) -> None:
    nodes.give_efa(2)

    told = nodes.run(EFA)

    assert "EFA" not in told
    assert "GPUs" not in told
    assert nodes.has_agent("a")
    assert nodes.has_agent("b")


def test_node_with_too_few_gpus_is_named_in_the_jobs_log_and_its_own(nodes: Nodes) -> None:
    told = nodes.run(GPUS, listed="GPU 0: NVIDIA (UUID: GPU-a)\nUnable to determine\n")

    words = "job.sbatch: a has 1 GPUs that nvidia-smi sees, and trainer.num_devices is 2\n"
    assert words in told
    assert words in nodes.log("a")
    assert not nodes.has_agent("a")


def test_node_without_efa_is_named(nodes: Nodes) -> None:
    told = nodes.run(EFA)

    assert "job.sbatch: b has no EFA device, and env.FI_PROVIDER is efa\n" in told
    assert not nodes.has_agent("b")


def test_node_with_less_efa_than_its_type_says_so_and_goes_on(nodes: Nodes) -> None:
    nodes.give_efa(1)

    told = nodes.run(EFA)

    assert "EFA" not in told
    assert "job.sbatch: b has 1 of the 2 EFA devices of ours\n" in nodes.log("b")
    assert nodes.has_agent("b")


def test_recipe_that_uses_another_network_needs_no_efa(nodes: Nodes) -> None:
    nodes.run(EFA | {"env": {"FI_PROVIDER": "tcp"}})

    assert nodes.has_agent("b")


@pytest.mark.parametrize(
    ("before", "words"),
    [
        pytest.param(
            "set -- /nowhere a,b 0", "does not see the run's folder, /nowhere", id="absent"
        ),
        pytest.param("rm -f -- job.json", "does not see the run's folder, ", id="another"),
        pytest.param("rm -rf logs && touch logs", "cannot write in the run's folder, ", id="write"),
    ],
)
def test_node_that_does_not_share_the_runs_folder_is_named(
    nodes: Nodes, before: str, words: str
) -> None:
    told = nodes.run({}, before=f'if [ "$SLURMD_NODENAME" = b ]; then {before}; fi')

    assert f"job.sbatch: b {words}" in told
    assert nodes.has_agent("a")
    assert not nodes.has_agent("b")


def test_limits_of_the_node_are_raised_or_told_of(nodes: Nodes) -> None:
    nodes.give_efa(2)

    nodes.run(EFA, before="ulimit -Sn 1000 && ulimit -Hn 1000 && ulimit -l 64")

    assert (
        "a gives a process 1000 open files at most, and 4 ranks may need 1056; raise"
        in nodes.log("a")
    )
    assert "a lets a process lock 64 KiB of memory, which is too little for EFA" in nodes.log("a")
    assert nodes.has_agent("a"), "the site may know better"


def test_agent_may_open_as_many_files_as_its_node_lets_it(nodes: Nodes) -> None:
    nodes.run({}, before="ulimit -Sn 100 && ulimit -Hn 3000")

    assert (nodes.folder / "files-a").read_text() == "3000\n"
