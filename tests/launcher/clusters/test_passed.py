"""Variables that a job on Slurm gets of the environment that it is submitted in."""

from __future__ import annotations

import pytest

from launcher.clusters.passed import sbatch_environment
from tests.launcher.shipped import shipped_job

TINY = "llama/llama3_tiny_pretrain"


@pytest.fixture(autouse=True)
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export variables that a person may have exported, and no others."""
    monkeypatch.setattr(
        "os.environ",
        {"HOME": "/home/me", "SBATCH_ACCOUNT": "a", "AWS_PROFILE": "p", "https_proxy": "h",
         "NCCL_DEBUG": "INFO", "TMPDIR": "/scratch", "LESS": "-R"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "names", "missed"),
    [
        ([], "HOME SBATCH_ACCOUNT", "AWS_PROFILE, NCCL_DEBUG, https_proxy"),
        (["+cluster.secrets.AWS_PROFILE={}", "+env.https_proxy=h", "+env.NCCL_DEBUG=WARN"],
         "AWS_PROFILE HOME SBATCH_ACCOUNT", ""),
        (["+cluster.extra_options.export=ALL"],
         "AWS_PROFILE HOME LESS NCCL_DEBUG SBATCH_ACCOUNT TMPDIR https_proxy", ""),
    ],
    ids=["plain", "named", "all"],
)  # fmt: skip
def test_sbatch_gets_what_the_job_does_and_a_note_names_the_rest(
    overrides: list[str], names: str, missed: str
) -> None:
    job = shipped_job(TINY, "slurm", overrides)

    environment, note = sbatch_environment(job)

    assert sorted({*environment} - {"PYTEST_CURRENT_TEST"}) == names.split()
    assert note.partition(", exported here")[0] == (
        f"the job does not get {missed}" if missed else ""
    )
