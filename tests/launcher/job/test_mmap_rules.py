"""What batches in mapped files cannot be, and how much memory they take."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from launcher.errors import RecipeError
from launcher.job.mmap_rules import num_positions
from tests.launcher.shipped import shipped_job

TINY, LARGE = "llama/llama3_tiny_pretrain", "llama/llama3_70b_pretrain"
ON = ("resilience/mmap=default", "resources.shm_gib=8")


def where(name: str) -> str:
    return f"resilience.mmap.{name}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{where('budget_mib')}=1", f"{where('prefetch_length')}=1000"],
            "resilience.mmap.budget_mib 1 is less than the 9 MiB that 1002 batches of 4 samples",
        ),
        (
            [f"{where('budget_mib')}=1", f"{where('checkpoint_frequency')}=1000"],
            "is less than the 17 MiB that 2010 batches",
        ),
        ([f"{where('folder')}=cache"], "resilience.mmap.folder 'cache'"),
        ([f"{where('keep_s')}=0"], "resilience.mmap.keep_s 0"),
        (
            [(f"{where('encryption')}={{kind: file, key_file: null, kms_key_id: null, "
             "endpoint: null, region: null}")],
            "resilience.mmap.encryption.key_file null; .*kind 'file' needs it",
        ),
        (
            [(f"{where('encryption')}={{kind: kms, key_file: /etc/key, kms_key_id: alias/a, "
             "endpoint: null, region: null}")],
            "resilience.mmap.encryption.key_file '/etc/key' has no effect with .*kind 'kms'",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        shipped_job(TINY, "local", [*ON, *overrides])
    assert re.search(message, str(refused.value))


def test_batches_stay_for_as_long_as_the_tiers_checkpoints_need_them() -> None:
    on = [*ON, f"{where('budget_mib')}=2", "resilience/tiered=ram"]
    with pytest.raises(RecipeError, match=r"the 9 MiB that .*, checkpoint_frequency 500\)"):
        shipped_job(TINY, "local", [*on, "resilience.tiered.ram.every_n_steps=500"])
    words = [f"{where('checkpoint_frequency')}=1", "resilience.tiered.ram.every_n_steps=500"]
    shipped_job(TINY, "local", [*on, *words])


def test_the_pods_shared_memory_has_room_for_the_batches() -> None:
    words = ["resilience/mmap=default", f"{where('budget_mib')}=1024"]
    with pytest.raises(RecipeError, match=r"shm_gib 1 is less than the 2 GiB that 2 workers"):
        shipped_job(TINY, "job", [*words, "resources.shm_gib=1"])
    elsewhere = [f"{where('folder')}=/data/x", "cluster.host_paths=[{path: /d, mount_path: /data}]"]
    shipped_job(TINY, "job", [*words, *elsewhere])


def test_a_folder_that_goes_with_its_container_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"mmap.folder '/var/x' is on no volume"):
        shipped_job(TINY, "job", [*ON, f"{where('folder')}=/var/x"])
    shipped_job(TINY, "slurm", [*ON, f"{where('folder')}=/var/x"])


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        (TINY, [], 2),
        (LARGE, [], 1),
        (LARGE, ["trainer.tensor_parallel=4"], 2),
        (LARGE, ["trainer.tensor_parallel=2", "trainer.context_parallel=2"], 2),
        (
            LARGE,
            ["trainer.num_nodes=2", "trainer.tensor_parallel=2", "trainer.pipeline_parallel=8"],
            1,
        ),
        (
            LARGE,
            ["trainer.num_nodes=2", "trainer.tensor_parallel=2", "trainer.pipeline_parallel=4"],
            2,
        ),
    ],
)
def test_workers_that_see_the_same_samples_share_a_position(
    recipe: str, overrides: Sequence[str], expected: int
) -> None:
    # Two nodes have no room for checkpoints of such a model.
    job = shipped_job(recipe, "slurm", [*overrides, "resilience.tiered=null"])

    assert num_positions(job) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param([], None, id="none"),
        pytest.param(["resilience/tiered=ram"], 10, id="of-the-memory"),
        pytest.param(["resilience/tiered=ram", f"{where('checkpoint_frequency')}=7"], 7, id="own"),
        pytest.param(
            [
                "resilience/tiered=ram",
                "resilience.tiered.ram.every_n_steps=null",
                "resilience.tiered.ram.every_s=60",
            ],
            None,
            id="by-time",
        ),
    ],
)
def test_batches_know_how_often_checkpoints_are_taken(
    overrides: Sequence[str], expected: int | None
) -> None:
    settings = shipped_job(TINY, "local", [*ON, *overrides]).resilience
    assert settings.batches
    assert settings.batches.checkpoint_frequency == expected
    assert settings.mmap
    assert settings.batches.budget_mib == settings.mmap.budget_mib
