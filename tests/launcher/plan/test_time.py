"""Steps, tokens and days of a run, and how long a replica is on its way."""

from __future__ import annotations

import pytest

from launcher.plan.devices import Device
from launcher.plan.time import duration, limit_days, replica_seconds, training_seconds, work
from tests.launcher.plan.worlds import LLAMA, job_of
from tests.launcher.shipped import shipped_job

LARGE = "llama/llama3_70b_pretrain_checkpointless"
DEVICE = Device(
    name="X", memory_gib=1, bf16_flop_s=1e12, link_gb_s=100, network_gbit_s=80, source=""
)


def test_days_are_those_of_the_formula() -> None:
    """660,352 parameters, 200 steps of 16 samples of 128 tokens, one device."""
    job = job_of(LLAMA, "trainer.num_devices=1")

    seconds = training_seconds(job, DEVICE, 0.5)

    assert seconds == pytest.approx(6 * 660_352 * 200 * 16 * 128 / (1e12 * 0.5))
    assert [each.value for each in work(job)] == [200, 200 * 16 * 128]


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    """GPT-OSS 120B: the 5.13 billion that its authors count, and the input embedding."""
    job = shipped_job("gpt_oss/gpt_oss_120b_full_checkpointless", "slurm")

    _, days = duration(job, DEVICE, 0.4)

    assert "6 x 5,711,982,912 active parameters" in days.formula


def test_a_job_without_a_limit_has_none() -> None:
    assert limit_days(job_of(LLAMA)) is None


@pytest.mark.parametrize(("overrides", "seconds"), [
    # 100 GB/s both ways are 50 each; 80 Gbit/s of the node are 10 GB/s for its 4 ranks.
    pytest.param(["trainer.num_devices=4"], 1.0, id="copies-on-the-node"),
    pytest.param(["trainer.num_nodes=2", "trainer.num_devices=4", "trainer.sharding=hybrid",
                  "trainer.num_replicas=2", "trainer.global_batch_size=32"], 20.0,
                 id="copies-on-other-nodes"),
])  # fmt: skip
def test_a_replica_takes_the_link_to_where_its_copy_is(
    overrides: list[str], seconds: float
) -> None:
    job = job_of(LLAMA, *overrides)

    assert replica_seconds(job, DEVICE, 50e9) == pytest.approx(seconds)
