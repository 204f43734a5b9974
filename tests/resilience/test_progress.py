"""Steps in what programs print: recorded output of common ones, and patterns of a user's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from resilience.progress import Progress, Step, find_problem

CAPTURES = Path(__file__).with_name("captures")


def steps_of(patterns: Sequence[str], text: str) -> list[Step]:
    """Return the steps of a text, whose lines also end where a bar returns to their begin."""
    progress = Progress(patterns)
    lines = re.split(r"[\r\n]+", text)
    found = [progress.feed(line, float(number)) for number, line in enumerate(lines)]
    return [each for each in (*found, progress.pop()) if each is not None]


def losses(patterns: Sequence[str], text: str) -> dict[int, float | str | None]:
    return {each.number: each.values.get("loss") for each in steps_of(patterns, text)}


@pytest.mark.parametrize(("file", "numbers", "some", "others"), [
    ("transformers-5.24.0.txt", range(1, 13), {4: 4.185}, {"lr": 3.75e-05, "grad_norm": 1.779}),
    ("lightning-2.6.6.txt", range(1, 31), {1: 0.176, 2: 0.547, 10: 0.375}, {}),
    ("torchtitan-00fbaaf-by-its-format.txt", [1, 10, 20], {1: 8.1661, 10: 4.7947, 20: 3.9071},
     {"grad_norm": 3.6855}),
    ("megatron-lm-86df799-by-its-format.txt", [1, 2, 100], {2: 10.44366, 100: 9.871234},
     {"lr": 1e-6, "grad_norm": 30.066}),
])  # fmt: skip
def test_steps_of_a_program_known_by_name(
    file: str,
    numbers: Sequence[int],
    some: Mapping[int, float],
    others: Mapping[str, float],
) -> None:
    """Each once, whatever else the program shows: bars of evaluations, and bars drawn again."""
    text = (CAPTURES / file).read_bytes().decode()
    steps = steps_of([file.partition("-")[0]], text)

    assert [each.number for each in steps] == list(numbers)
    shown = {each.number: each.values.get("loss") for each in steps}
    assert {number: shown[number] for number in some} == some
    first = next((each.values for each in steps if set(others) <= set(each.values)), {})
    assert {name: first.get(name) for name in others} == others


def test_losses_that_stand_in_lines_of_their_own_belong_to_the_step_before() -> None:
    text = (CAPTURES / "transformers-5.24.0.txt").read_bytes().decode()
    logged = re.findall(r"\{'loss': '([\d.]+)'", text)
    shown = losses(["transformers"], text)

    assert [str(shown[step]) for step in (4, 8, 12)] == logged
    assert {step for step, loss in shown.items() if loss is not None} == {4, 8, 12}


TWO = [r"step (?P<step>\d+)", r"loss=(?P<loss>\S+)"]
BATCH = [r"batch (?P<step>\d+)"]


@pytest.mark.parametrize(("patterns", "text", "shown"), [
    pytest.param([r"step (?P<step>\d+).*loss (?P<loss>[\d.]+)"],
                 "begin\nstep 1 of 9, loss 2.5\nstep 2 of 9, loss 1.5\nend", {1: 2.5, 2: 1.5},
                 id="one-line"),
    pytest.param(TWO, "step 1\nloss=2.5\nstep 2\nloss=1.5", {1: 2.5, 2: 1.5}, id="two-lines"),
    pytest.param(TWO, "loss=2.5\nstep 1\nstep 2", {1: 2.5, 2: None}, id="value-comes-first"),
    pytest.param(TWO[:1], "step 5\nstep 5\nstep 6", {5: None, 6: None}, id="said-twice"),
    pytest.param(BATCH, "batch 0\nbatch 1\nbatch 2\nbatch 0\nbatch 1", dict.fromkeys(range(5)),
                 id="next-epoch-from-0"),
    pytest.param(BATCH, "batch 1\nbatch 2\nbatch 1\nbatch 2", dict.fromkeys(range(1, 5)),
                 id="next-epoch-from-1"),
    pytest.param([r"it (?P<step>[\d,]+) (?P<loss>\S+)"],
                 "it 1,000 nan\nit 9999999999999999 1\nit 1,001 bad", {1000: "nan", 1001: "bad"},
                 id="odd-numbers"),
    pytest.param(TWO[:1], "\x1b[31mst\x1b[0mep \x1b[1;32m7\x1b[K", {7: None}, id="colours"),
    pytest.param(TWO[:1], "x" * 600 + "step 7", {}, id="far-in-a-long-line"),
])  # fmt: skip
def test_steps_by_patterns_of_a_user(
    patterns: list[str], text: str, shown: dict[int, float | str | None]
) -> None:
    found = losses(patterns, text)

    assert {step: "nan" if loss != loss else loss for step, loss in found.items()} == shown


def test_a_step_is_as_old_as_its_first_line() -> None:
    (step,) = steps_of([r"it (?P<step>\d+)", r"loss (?P<loss>\S+)"], "a\nit 5\nb\nloss 1\nit 5")

    assert (step.seen_s, step.values) == (1.0, {"loss": 1.0})


def test_a_step_that_was_taken_is_not_shown_again() -> None:
    progress = Progress([r"it (?P<step>\d+)"])
    progress.feed("it 5", 1.0)

    assert [progress.pop() and 5, progress.pop()] == [5, None]
    assert progress.feed("it 5", 2.0) is None
    assert progress.shown is None


@pytest.mark.parametrize(("patterns", "problem"), [
    ([], None),
    (["transformers"], None),
    ([r"(?P<step>\d+)/\d{2}", r"loss (?P<loss>[\d.]+)"], None),
    ([r"(?P<step>\d{1,3}(,\d{3})*)"], None),
    ([r"(?:step|it)? (?P<step>\d+)"], None),
    (["lightening"], "is none of lightning, megatron, torchtitan, transformers, and has no group"),
    ([r"loss (?P<loss>.)"], "no group (?P<step>\\d+) is in 'loss (?P<loss>.)'"),
    ([r"(?P<step>\d+"], r"'(?P<step>\d+' is no regular expression: missing )"),
    ([r"(?P<step>(\d+)+)x"], "a repeat within a repeat"),
    ([r"(?P<step>\d)(?=(a|b+)*c)"], "a repeat within a repeat"),
    ([r"(?P<step>\d+) (?P<rank>\d)"], "has a group rank"),
])  # fmt: skip
def test_pattern_that_could_not_work_is_refused(patterns: list[str], problem: str | None) -> None:
    found = find_problem(patterns)

    assert (found is None) if problem is None else (problem in (found or ""))
