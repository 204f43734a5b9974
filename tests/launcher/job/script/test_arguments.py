"""What a program gets as its arguments, for each style."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.job.script.arguments import argument_words
from tests.launcher.script_job import refused, script_job

ARGUMENTS = {
    "lr": "3e-4", "steps": 200, "ratio": 0.5, "bf16": True, "debug": False, "name": None,
    "training": {"steps": 5, "seed": None}, "text": "", "-v": "x",
}  # fmt: skip


@pytest.mark.parametrize(
    ("style", "booleans", "expected"),
    [
        pytest.param(
            "--key value", "flag",
            "--lr 3e-4 --steps 200 --ratio 0.5 --bf16 --training.steps 5 --text  -v x",
            id="words",
        ),
        pytest.param(
            "--key value", "value",
            "--lr 3e-4 --steps 200 --ratio 0.5 --bf16 true --debug false --training.steps 5 "
            "--text  -v x",
            id="words-with-values",
        ),
        pytest.param(
            "--key=value", "flag",
            "--lr=3e-4 --steps=200 --ratio=0.5 --bf16 --training.steps=5 --text= -v=x",
            id="one-word",
        ),
        pytest.param(
            "--key=value", "value",
            "--lr=3e-4 --steps=200 --ratio=0.5 --bf16=true --debug=false --training.steps=5 "
            "--text= -v=x",
            id="one-word-with-values",
        ),
        pytest.param(
            "key=value", "flag",
            "lr=3e-4 steps=200 ratio=0.5 bf16=true debug=false training.steps=5 text= -v=x",
            id="hydra",
        ),
    ],
)  # fmt: skip
def test_each_style_has_its_words(style: Any, booleans: Any, expected: str) -> None:
    assert argument_words(ARGUMENTS, style, booleans) == expected.split(" ")


def test_lists_are_words() -> None:
    """As a value they follow their key, and in the place of the mapping they are all words."""
    words = ("--lr", "3e-4", "a b")

    assert argument_words({"b": ("1", "2")}, "--key value", "flag") == ["--b", "1", "2"]
    assert argument_words(words, "key=value", "value") == list(words)
    assert script_job(arguments=["--n", 1.5, True]).trainer.arguments == ("--n", "1.5", "true")
    assert "the value None; allowed: " in refused(trainer__arguments={"a": 1, "b": [2, None]})[0]


@pytest.mark.parametrize(
    "arguments",
    [5, "--lr 1", [None], [["a"]], {"a": [{"b": 1}]}, {"a=b": 1}, {"a": "x\0"}, {"": 1}],
)
def test_other_arguments_are_refused(arguments: Any) -> None:
    assert "allowed: " in refused(trainer__arguments=arguments)[0]
