"""The devices of each instance: memory, speed, links. Reads devices.yaml, which has the sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from launcher.job.workload import Instance

TABLE = "launcher/plan/devices.yaml"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of an instance."""

    name: str
    memory_gib: float
    bf16_flop_s: float
    """Dense operations a second in bf16 at the most."""
    link_gb_s: float
    """To the other devices of the node, both ways together."""
    network_gbit_s: float
    """Of the whole node."""
    source: str


def read_device(instance: Instance) -> Device | None:
    """Return the device of an instance, None where it has none or the table lacks it."""
    entry = _read_table()["instances"].get(instance.type)
    if instance.accelerator == "cpu" or entry is None:
        return None
    name, network = entry
    return Device(name=name, network_gbit_s=network, **_read_table()["devices"][name])


def known_instances() -> list[str]:
    """Return the instances of the table."""
    return sorted(_read_table()["instances"])


@cache
def _read_table() -> dict[str, Any]:
    text = Path(__file__).with_suffix(".yaml").read_text("utf-8")
    table: dict[str, Any] = yaml.load(text, Loader=_Loader)
    return table
