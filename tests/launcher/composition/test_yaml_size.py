"""YAML files that would grow beyond all bounds, refused before anything is built from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.composition.yaml_size import DEPTH_MAX, NODES_MAX, check_yaml_size
from launcher.errors import RecipeError
from tests.launcher.command import launch, put, refuse

TINY = "llama/llama3_tiny_pretrain"
HEAD = "# @package _global_\ndefaults:\n  - llama/llama3_tiny_pretrain\n  - _self_\n"
FILE = Path("mine.yaml")
# Nine lines, each nine times the one before.
BOMB = "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9) if level else 'x'}]\n"
    for level in range(9)
)
DEEP = "x: " + "[" * 200 + "1" + "]" * 200 + "\n"
# Each level holds the one before ten deep.
DEEP_BY_ALIASES = "".join(
    f"a{level}: &a{level} {'[' * 10}{f'*a{level - 1}' if level else '1'}{']' * 10}\n"
    for level in range(20)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level}\n  <<: [{', '.join([f'*a{level - 1}'] * 30)}]\n" for level in range(1, 6)
)
TOO_LARGE = [
    pytest.param(BOMB, 6, "keys and values by here", id="aliases"),
    pytest.param(DEEP, 1, "101 deep within each other; allowed: at most 100", id="deep"),
    pytest.param(DEEP_BY_ALIASES, 10, "deep within each other", id="deep-by-aliases"),
    pytest.param(BOMB + DEEP, 6, "keys and values by here", id="both"),
    pytest.param(MERGED, 7, "keys and values by here", id="merge-keys"),
    pytest.param("a: &a [1, *a]\n", 1, "*a stands within &a", id="holds-itself"),
    pytest.param("- 1\n" * NODES_MAX, NODES_MAX, "keys and values by here", id="long"),
]


@pytest.mark.parametrize(("text", "line", "problem"), TOO_LARGE)
def test_a_text_that_is_too_large_is_refused_with_its_line(
    text: str, line: int, problem: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        check_yaml_size(text, FILE)

    assert str(refused.value).startswith(f"mine.yaml, line {line}: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize("text", [
    pytest.param("", id="empty"),
    pytest.param("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n", id="aliases"),
    pytest.param("- 1\n" * (NODES_MAX - 1), id="as-many-as-allowed"),
    pytest.param("[" * DEPTH_MAX + "]" * DEPTH_MAX, id="as-deep-as-allowed"),
])  # fmt: skip
def test_what_is_within_bounds_passes(text: str) -> None:
    check_yaml_size(text, FILE)


@pytest.mark.parametrize("place", ["model", "instance"])
def test_broken_yaml_of_a_group_is_refused_with_its_line(tmp_path: Path, place: str) -> None:
    path = put(tmp_path / "conf" / place / "ours.yaml", "a: [\n")
    override = "model=ours" if place == "model" else "instance.type=ours"

    said = refuse(tmp_path, f"recipe={TINY}", override)

    assert said.startswith(f"{path}, line 2, column 1: ")
    assert said.count("\n") == 1


_VALUES = st.recursive(
    st.integers(0, 3), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from("abc"), inner, max_size=3), max_leaves=30,
)  # fmt: skip


def _nodes(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + _nodes(each) for each in value.values())
    return 1 + sum(map(_nodes, value)) if isinstance(value, list) else 1


@settings(max_examples=5)
@given(_VALUES, st.integers(1, 6))
def test_aliases_count_as_all_that_they_stand_for(value: object, times: int) -> None:
    """Counted against what the text is read as, at the very bound."""
    shared = [value] * times
    text = yaml.safe_dump({"shared": shared})
    nodes = _nodes({"shared": yaml.safe_load(text)["shared"]})
    filler = "- 1\n" * (NODES_MAX - nodes - 2)

    check_yaml_size(f"{text}filler:\n{filler}", FILE)
    with pytest.raises(RecipeError):
        check_yaml_size(f"{text}filler:\n{filler}- 1\n", FILE)


@settings(max_examples=40)
@given(
    st.lists(st.booleans(), min_size=DEPTH_MAX - 12, max_size=DEPTH_MAX + 12),
    st.sampled_from([True, False, None]),
)
def test_depth_is_judged_alike_however_it_is_written(kinds: list[bool], style: bool | None) -> None:
    """Lists and mappings in turn, in blocks, flows and a mixture: short texts are not parsed."""
    value: object = 1
    for is_list in kinds:
        value = [value] if is_list else {"a": value}
    text = yaml.safe_dump(value, default_flow_style=style, width=10**6)

    if len(kinds) > DEPTH_MAX:
        with pytest.raises(RecipeError, match="deep within each other"):
            check_yaml_size(text, FILE)
    else:
        check_yaml_size(text, FILE)


@pytest.mark.parametrize(
    "place", ["recipe", "path", "included", "group", "instance", "searched", "package"]
)
def test_no_file_of_a_person_grows(tmp_path: Path, place: str) -> None:
    """Whichever way it is read: one message with file and line, status 2."""
    recipes, models, instances = (
        tmp_path / name for name in ("recipes", "conf/model", "conf/instance")
    )
    searched = tmp_path / "searched" / "model"
    for folder in (recipes, models, instances, searched):
        folder.mkdir(parents=True)
    path, arguments, head = {
        "recipe": (recipes / "mine.yaml", ["recipe=mine"], HEAD),
        "path": (tmp_path / "mine.yaml", ["recipe=mine.yaml"], HEAD),
        "included": (recipes / "base.yaml", ["recipe=mine"], HEAD),
        "group": (models / "ours.yaml", [f"recipe={TINY}", "model=ours"], ""),
        "instance": (instances / "ours.yaml", [f"recipe={TINY}", "instance.type=ours"], ""),
        "searched": (searched / "ours.yaml", [f"recipe={TINY}", "model=ours",
                     f"hydra.searchpath=[file://{searched.parent}]"], ""),
        "package": (searched / "pkgd.yaml", [f"recipe={TINY}", "model=pkgd",
                    "hydra.searchpath=[pkg://searched]"], ""),
    }[place]  # fmt: skip
    if place == "package":
        for folder in (searched.parent, searched):
            (folder / "__init__.py").touch()
    (recipes / "mine.yaml").write_text("# @package _global_\ndefaults: [base, _self_]\n")
    path.write_text(head + BOMB)

    packages = {"PYTHONPATH": str(tmp_path)} if place == "package" else None
    ended = launch(*arguments, folder=tmp_path, env=packages)

    assert ended.status == 2
    assert ended.out == ""
    named = "pkg://searched/model/pkgd.yaml" if place == "package" else path
    assert ended.err.startswith(f"{named}, line {6 + head.count(chr(10))}: ")
    assert "keys and values by here" in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("depth", [60, 99])
@pytest.mark.parametrize("text", ["x: {}\n", "env: {}\n"])
def test_what_is_deep_within_bounds_is_no_bug_of_ours(
    tmp_path: Path, text: str, depth: int
) -> None:
    """OmegaConf calls itself some ten times a level; the job's own values lie 8 deep at most."""
    (tmp_path / "mine.yaml").write_text(HEAD + text.format("{a: " * depth + "1" + "}" * depth))

    ended = launch("recipe=mine.yaml", folder=tmp_path)

    assert ended.status == 2
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) <= 3
