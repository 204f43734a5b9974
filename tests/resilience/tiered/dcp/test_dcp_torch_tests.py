"""PyTorch's own tests of torch.distributed.checkpoint, over the tiers as over files.

Each file of theirs runs twice, unchanged: over FileSystemWriter and FileSystemReader, and over
TieredWriter and TieredReader in their place. What passes over files on a CPU passes over the tiers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.resilience.tiered.daemons import ROOT, Daemon

SOURCE = ROOT / ".venv-torch-tests"
TESTS = SOURCE / "test" / "distributed" / "checkpoint"
CHANGES = Path(__file__).parent / "torch_storage"
LIMIT_S = 1500.0

FILES = (
    "test_file_system_checkpoint_cpu.py",
    "test_compatibility.py",
    "test_planner.py",
    "test_format_utils.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_tp_checkpoint.py",
    "e2e/test_e2e_save_and_load.py",
)
"""Those that save or load through a storage, and have tests that a CPU can run.

The others need GPUs (test_file_system_checkpoint, test_save_load_api and those of FSDP's first
version), or bring a storage of their own (test_checkpoint, test_fsspec).
"""

DIFFERENCES: dict[str, str] = {}
"""What passes over files alone, and why."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(
        not (SOURCE / "version").exists(),
        reason="no tests of PyTorch's here: scripts/install-torch-tests.sh fetches them",
    ),
]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(folder=tmp_path / "arena", budget_mib=1024) as running:
        yield running.start()


def run_file(name: str, report: Path, socket: str) -> dict[str, str]:
    """Run a file of tests; returns by test what came of it."""
    paths = [str(CHANGES), str(SOURCE / "packages"), str(ROOT)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TIERED_TESTS_SOCKET": socket,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    own = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
    words = ["-c", os.devnull, "--rootdir", str(TESTS), "-p", "no:cacheprovider", "-q"]
    with report.with_suffix(".log").open("wb") as output:
        subprocess.run(
            [sys.executable, "-m", "pytest", *words, name, f"--junitxml={report}"],
            cwd=TESTS,
            env={key: value for key, value in environment.items() if key not in own},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    return {
        f"{each.get('classname', '').rpartition('.')[2]}.{each.get('name')}": _outcome(each)
        for each in ElementTree.parse(report).iter("testcase")
    }


def _outcome(case: ElementTree.Element) -> str:
    return next((each.tag for each in case if not each.tag.startswith("system")), "passed")


@pytest.mark.parametrize("name", FILES)
def test_what_passes_over_files_passes_over_the_tiers(
    daemon: Daemon, tmp_path: Path, name: str
) -> None:
    with ThreadPoolExecutor(2) as pool:
        files = pool.submit(run_file, name, tmp_path / "files.xml", "")
        tiers = pool.submit(run_file, name, tmp_path / "tiers.xml", str(daemon.socket_path))
    over_files, over_tiers = files.result(), tiers.result()
    passed = {each for each, outcome in over_files.items() if outcome == "passed"}
    different = {each for each in passed if over_tiers.get(each) != "passed"}

    assert passed, f"a CPU can run none of {sorted(over_files)}"
    assert different == DIFFERENCES.keys() & over_files.keys(), (tmp_path / "tiers.log").read_text()
    assert daemon.client("any").status()["held_bytes"] > 0, "nothing was saved into the daemon"
