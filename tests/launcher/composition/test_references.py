"""References between values that would grow beyond all bounds, refused before one is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from launcher.composition.compose import resolve
from launcher.composition.references import CHARACTERS_MAX, foreign_resolvers, growth_problem
from launcher.errors import RecipeError
from tests.launcher.command import refuse

HEAD = "# @package _global_\ndefaults: [llama/llama3_tiny_pretrain, _self_]\n"


def _before(level: int, key: str) -> str:
    return f"${{{key}{level - 1}}}"


# Nine lines, each nine times the one before.
TEXTS = "env:\n  X0: abcdefghi\n" + "".join(
    f"  X{level}: '{_before(level, 'env.X') * 9}'\n" for level in range(1, 10)
)
LISTS = "x0: [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    "x{}: [{}]\n".format(level, ", ".join([repr(_before(level, "x"))] * 9))
    for level in range(1, 10)
)
RELATIVE = TEXTS.replace("${env.", "${.")
SELECTED = TEXTS.replace("${env.", "${oc.select:env.")


@pytest.mark.parametrize("text", [TEXTS, LISTS, RELATIVE, SELECTED],
                         ids=["texts", "lists", "relative", "resolver"])  # fmt: skip
def test_a_recipe_whose_references_grow_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(HEAD + text)

    said = refuse(tmp_path, "recipe=mine.yaml")

    assert said.endswith(
        f" characters, its references followed; allowed: at most {CHARACTERS_MAX}\n"
    )


@pytest.mark.parametrize("config", [
    {"a": "x", "b": "${a}${c}", "c": "${b}"},
    {"a": "${a}"},
    {"a": "${nowhere}", "b": ["${a}", {"c": "${..d}"}], "d": "${b[1].c}"},
    {"a": "\\${b}", "b": 1, "c": None},
])  # fmt: skip
def test_rings_and_missing_keys_are_left_to_the_one_who_resolves(config: dict[str, Any]) -> None:
    assert growth_problem(config) is None


_KEYS = ("a", "b", "c", "d")
LONG = "x" * 300_000


@settings(max_examples=10)
@given(st.lists(st.lists(st.sampled_from([LONG, "y", "${a}", "${b}", "${c}"]), max_size=4),
                min_size=4, max_size=4))  # fmt: skip
def test_what_becomes_too_large_is_refused_and_what_stays_small_passes(
    parts: list[list[str]],
) -> None:
    """A key refers to earlier ones only, so that there is no ring."""
    config = {
        key: "".join(part for part in row if not part.startswith("$") or part[2] < key)
        for key, row in zip(_KEYS, parts, strict=True)
    }
    resolved = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    assert isinstance(resolved, dict)
    sizes = [len(str(value)) for value in resolved.values()]

    is_refused = growth_problem(config) is not None

    assert is_refused or max(sizes) <= CHARACTERS_MAX
    # Each reference's own characters count as well.
    assert not is_refused or max(sizes) > CHARACTERS_MAX - 1000


@pytest.mark.parametrize("reference", [
    "${s.aN}", "${ s.aN }", "${ oc.select : s.aN }", "${t.aN}", "${t.s.aN}", "${l[0_0].aN}",
])  # fmt: skip
def test_what_grows_through_any_form_of_a_reference_is_refused(reference: str) -> None:
    lines = [10 * reference.replace("N", str(number)) for number in range(8)]
    section = {"a0": 10 * "x", **{f"a{i}": line for i, line in enumerate(lines, 1)}}
    through = "${oc.select:s}" if "t.a" in reference else {"s": "${s}"}

    assert growth_problem({"s": section, "t": through, "l": ["${s}"]})


@pytest.mark.parametrize(("text", "resolvers"), [
    ("${trainer.num_nodes}", []),
    ("${..a.b} and ${a[0].b}", []),
    ('${env["A"]}', ['env["A"]']),
    ("${trainer.${env.A}}", ["trainer.${env.A"]),
    ("${oc.select: 'env.a'}", ["oc.select"]),
    ("${oc.select:${env.A}}", ["oc.select"]),
    ("${ oc.select : a.b , 'x y' }", []),
    (r"${oc.create:{A:'\${oc.env:HOME}'}}", ["oc.create"]),
    (r"${oc.decode:'{A: 1}'}", ["oc.decode"]),
    ("${oc.dict.values:env}", ["oc.dict.values"]),
    ("${default_image:}", []),
    ("${oc.select:a.b,null}", []),
    (r"\${oc.env:HOME}", []),
    ("${oc.env:HOME}", ["oc.env"]),
    ("${ now : %H}", ["now"]),
    (r"\\${oc.env:HOME}", ["oc.env"]),
    ("${oc.${env.A}:HOME}", ["oc.${env.A}"]),
    ("${oc.${env.${env.B}}:HOME}", ["oc.${env.${env.B}}", "env.${env.B"]),
    ("${oc.select:a,${oc.env:HOME}}", ["oc.env"]),
    ('${oc.select:a,"${oc.env:HOME}"}', ["oc.env"]),
])  # fmt: skip
def test_what_a_text_takes_from_outside_the_config_is_found(
    text: str, resolvers: list[str]
) -> None:
    assert list(foreign_resolvers(text)) == resolvers


@pytest.mark.parametrize("text", [r"'\\${oc.env:HOME}'", "${oc.${env.B}:HOME}"])
def test_no_job_holds_a_variable_of_the_machine(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - llama/llama3_tiny_pretrain\n  - _self_\n"
        f"env:\n  A: {text}\n  B: env\n"
    )

    with pytest.raises(RecipeError, match=r"env\.A takes its value from \$\{oc\."):
        resolve("mine.yaml", start=tmp_path)
