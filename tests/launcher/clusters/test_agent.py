"""What agents and daemons are called with, on each kind of cluster."""

from __future__ import annotations

import re

import pytest

from launcher.composition.changing import change_job
from tests.launcher.shipped import CLUSTERS, rendered, shipped_job

TIERED = "llama/llama3_tiny_tiered"


@pytest.mark.parametrize("cluster", [each for each in CLUSTERS if each != "hyperpod"])
def test_tls_is_asked_for_of_each_agent_and_daemon(cluster: str) -> None:
    before = shipped_job(TIERED, cluster)
    job = change_job(before, ["cluster.tls=true"], hint="").job

    started = r"-m (?:\\\n\s+)?resilience\.(?:agent|tiered\.memoryd) (?:.*\\\n)*.*"
    for each, is_asked in ((before, False), (job, True)):
        words = [word for text in rendered(each).values() for word in re.findall(started, text)]
        assert words
        assert {" --tls " in f"{word} ".replace("\\\n", " ") for word in words} == {is_asked}
    assert "tls" not in before.to_json()
