"""Recorded behaviour of AWS's agent, and the differences of ours.

python -m tests.scenarios.operators.judging    record AWS's agent anew, in aws_agent.yaml
"""

from __future__ import annotations

import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.scenarios.operators.agents import AGENTS, Script
from tests.scenarios.operators.playing import Play, Transcript

FOLDER = Path(__file__).parent
RECORDING = FOLDER / "aws_agent.yaml"
SCRIPTS: dict[str, Script] = yaml.safe_load((FOLDER / "scripts.yaml").read_text())
DIFFERENCES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "differences.yaml").read_text())
IN_PROCESS = [name for name, script in SCRIPTS.items() if script.get("in_process", True)]
"""Scripts that AWS's agent is played in its other mode as well."""
STATES = ("answer", "status", "transitions", "exit", "left")
"""Names that are compared between the two modes of AWS's agent."""
_HEAD = (
    f"# What AWS's agent does at scripts.yaml: written by {__spec__.name if __spec__ else ''}.\n"
)


def play(folder: Path, agent: str, names: list[str], at_once: int = 8) -> dict[str, Transcript]:
    """Return what an agent does at scripts, which are played beside each other."""

    def play_one(name: str) -> Transcript:
        (own := folder / name).mkdir(parents=True)
        return Play(own, SCRIPTS[name], AGENTS[agent]).play()

    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(names, pool.map(play_one, names), strict=True))


def compare(
    first: dict[str, Transcript], second: dict[str, Transcript]
) -> dict[str, tuple[str, str]]:
    """Return what differs, by script, step and name."""
    found = {}
    for script, steps in first.items():
        for step, seen in steps.items():
            other = second[script][step]
            for name in sorted(seen.keys() | other.keys()):
                if (pair := (seen.get(name, "absent"), other.get(name, "absent")))[0] != pair[1]:
                    found[f"{script} / {step} / {name}"] = pair
    return found


def fits(pattern: str, text: str) -> bool:
    """Say whether a text is the pattern, in which * stands for anything."""
    return bool(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text))


def judge(found: dict[str, tuple[str, str]]) -> list[str]:
    """Return what is wrong: a difference that is not in the list, or one that is no more."""
    wrong, known = [], set()
    for entry in DIFFERENCES:
        for place, values in entry["at"].items():
            there = {each: pair for each, pair in found.items() if fits(place, each)}
            hits = {each for each, pair in there.items() if all(map(fits, values, pair))}
            known |= hits
            wrong += [] if hits else [f"no more: {place}: {values}"]
    return wrong + [f"not listed: {each}: {found[each]}" for each in found if each not in known]


def compare_modes(
    usual: dict[str, Transcript], other: dict[str, Transcript]
) -> dict[str, tuple[str, str]]:
    """Return where the states of AWS's agent differ in the mode whose workers stay."""
    found = compare({name: usual[name] for name in other}, other)
    return {place: pair for place, pair in found.items() if place.split(" / ")[-1] in STATES}


def read_recording() -> tuple[dict[str, Transcript], dict[str, tuple[str, str]]]:
    """Return what AWS's agent does, and what differs in its other mode."""
    told = yaml.safe_load(RECORDING.read_text())
    return told["aws"], {name: tuple(pair) for name, pair in told["in process"].items()}


def record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        usual = play(Path(folder) / "aws", "aws", list(SCRIPTS), 2)
        other = play(Path(folder) / "other", "aws in process", IN_PROCESS, 2)
    differing = {place: [*pair] for place, pair in compare_modes(usual, other).items()}
    told = {"aws": usual, "in process": differing}
    text = yaml.safe_dump(told, sort_keys=False, default_flow_style=None, width=1000)
    RECORDING.write_text(_HEAD + text)


if __name__ == "__main__":
    sys.exit(record())
