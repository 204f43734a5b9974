"""The same scripts for AWS's agent and ours: each difference stands in a list, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.operators.agents import AWS_PYTHON, ROOT
from tests.scenarios.operators.judging import (
    DIFFERENCES,
    IN_PROCESS,
    SCRIPTS,
    compare,
    compare_modes,
    judge,
    play,
    read_recording,
)

needs_agent = pytest.mark.skipif(
    not AWS_PYTHON.exists(), reason=f"no {AWS_PYTHON}; scripts/install-aws-agent.sh makes it"
)


def test_our_agent_differs_from_what_aws_agent_was_seen_to_do_as_listed_alone(
    tmp_path: Path,
) -> None:
    recorded, _ = read_recording()

    found = compare(recorded, play(tmp_path, "ours", list(SCRIPTS)))

    assert judge(found) == []


def test_a_difference_that_is_not_listed_and_one_that_is_no_more_are_told() -> None:
    recorded, _ = read_recording()
    wrong = judge(compare(recorded, {**recorded, "killed": recorded["killed"] | {"exit": {}}}))

    assert "not listed: killed / exit / exit: ('1', 'absent')" in wrong
    assert any(each.startswith("no more: * / * / spare: ") for each in wrong)


def test_the_documentation_has_the_list() -> None:
    rows = [f"| {each['aws']} | {each['ours']} | {each['why']} |" for each in DIFFERENCES]
    text = (ROOT / "docs" / "clusters.md").read_text("utf-8")

    table = text.partition("| AWS's agent | ours | why |\n|---|---|---|\n")[2].partition("\n\n")[0]

    assert table.splitlines() == rows


@needs_agent
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_aws_agent_does_what_was_recorded(name: str, tmp_path: Path) -> None:
    recorded, _ = read_recording()

    assert compare({name: recorded[name]}, play(tmp_path, "aws", [name])) == {}


@needs_agent
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PROCESS)
def test_aws_agent_differs_in_its_other_mode_as_recorded(name: str, tmp_path: Path) -> None:
    recorded, differing = read_recording()
    expected = {place: pair for place, pair in differing.items() if place.startswith(f"{name} / ")}

    found = compare_modes(recorded, play(tmp_path, "aws in process", [name]))

    assert found == expected
