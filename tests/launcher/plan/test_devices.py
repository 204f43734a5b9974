"""The table of devices has every shipped instance with GPUs, and a source for each device."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.job.workload import Instance
from launcher.paths import shipped_folder
from launcher.plan.devices import TABLE, known_instances, read_device

INSTANCES = [
    Instance.model_validate(yaml.safe_load(path.read_text()))
    for path in sorted((shipped_folder() / "conf" / "instance").glob("*.yaml"))
]


def test_every_shipped_instance_with_gpus_is_known_and_no_other() -> None:
    with_gpus = [each.type for each in INSTANCES if each.accelerator == "gpu"]

    assert known_instances() == sorted(with_gpus)


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda each: each.type)
def test_numbers_are_those_of_a_device(instance: Instance) -> None:
    device = read_device(instance)

    assert (device is None) == (instance.accelerator != "gpu")
    if device is not None:
        assert 20 < device.memory_gib < 300
        assert 5e13 < device.bf16_flop_s < 3e15
        assert 60 < device.link_gb_s < 2000
        assert 5 < device.network_gbit_s < 7000
        assert "datasheet" in device.source


def test_the_table_says_where_networks_come_from() -> None:
    text = (Path(shipped_folder()) / TABLE).read_text()

    assert "Source: AWS" in text
