"""Texts of the command line arrive as they were typed, and no key counts twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.composition.changing import parse_overrides
from launcher.errors import RecipeError
from launcher.written.overrides import check_given_twice, keep_text
from tests.launcher.command import refuse

TEXTS = ["1.10", "010", "1:30", "1e5", "on", "NO", "True", "true", "1_000", "+1", ".5", "-0", "7",
         "inf", "1.10:30", "1.10 2", "'1.10'", '"a, b"']  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("form", ["+env.A={}", "env.A={}", "+env={{A: {}}}"])
def test_a_variable_is_the_text_that_was_typed(form: str, text: str) -> None:
    # Hydra's grammar has no unquoted colons and blanks within a mapping that end in a number.
    if "{{" in form and text in ("1.10:30", "1.10 2"):
        text = f"'{text}'"
    value = OverridesParser.create().parse_override(keep_text(form.format(text))).value()
    found = value["A"] if isinstance(value, dict) else value
    shown = str(found).lower() if isinstance(found, bool) else str(found)

    assert shown == text.strip("'\"")


@pytest.mark.parametrize(("override", "kept"), [
    ("env.A=1.10,1.20", "env.A='1.10','1.20'"),
    ("env.A=choice(1.10, x)", "env.A=choice('1.10', x)"),
    ("+cluster.affinity.required={a.b/c: [1.10, on]}",
     "+cluster.affinity.required={a.b/c: ['1.10', on]}"),
    ("+cluster.labels={a: 1.10}", "+cluster.labels={a: '1.10'}"),
    ("+env.A=null", "+env.A=null"), ("env.A=host:1.10", "env.A=host:1.10"),
    ("env.A=${trainer.seed}", "env.A=${trainer.seed}"),
    ("~env.A", "~env.A"),
    ("trainer.optimizer.lr=1.10", "trainer.optimizer.lr=1.10"),
])  # fmt: skip
def test_quotes_are_put_around_texts_alone(override: str, kept: str) -> None:
    assert keep_text(override) == kept


@pytest.mark.parametrize(("arguments", "message"), [
    (["a.b=1", "c=2", "a.b=3"], "a.b is given twice, by 'a.b=1' and 'a.b=3'; give it once"),
    (["+env.A=1", "++env.A=2"], "env.A is given twice"),
    (["x={a: {b: 1, b: 2}}"], "holds the key 'b' twice in a mapping"),
    (["+env={A: 1, 'A': 2}"], "holds the key 'A' twice in a mapping"),
    (["a=1", "a.b=2", "~c", "+c=3"], None),
    (["x=[{a: 1}, {a: 1}]", "y={a: {b: 1}, b: 2}", "z='{a: 1, a: 1}'", "w=]}:"], None),
])  # fmt: skip
def test_a_key_that_is_given_twice_is_refused(arguments: list[str], message: str | None) -> None:
    if message is None:
        check_given_twice(arguments)
        return
    with pytest.raises(RecipeError, match="twice") as refused:
        check_given_twice(arguments)
    assert message in str(refused.value)


def test_every_command_that_takes_overrides_refuses_a_key_twice(tmp_path: Path) -> None:
    words = ("trainer.max_steps=3", "trainer.max_steps=4")
    said = "trainer.max_steps is given twice, by 'trainer.max_steps=3' and 'trainer.max_steps=4'"

    assert refuse(tmp_path, "recipe=llama/llama3_tiny_pretrain", *words).startswith(said)
    assert refuse(tmp_path, "show", "llama/llama3_tiny_pretrain", *words).startswith(said)
    with pytest.raises(RecipeError, match="given twice"):
        list(parse_overrides(words))
    assert list(parse_overrides(["env.A=1.10"])) == [("env.A", "1.10")]
