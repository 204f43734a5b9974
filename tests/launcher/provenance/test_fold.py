"""Layers on each other are what OmegaConf makes of them, and each value knows its layer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.provenance.fold import (
    SECTION,
    FileLayer,
    Fold,
    Origin,
    OverrideLayer,
    Setting,
    TreeNode,
    fold,
)
from launcher.provenance.lines import Lines, parse_lines

KEYS = st.sampled_from(["a", "b", "c"])
SCALARS = st.one_of(
    st.integers(0, 3), st.booleans(), st.none(),
    st.sampled_from(["x", "???", "${a}", "${b.c}", "${.a}", "${..b}", "1.5", ""]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)
CONTENTS = st.dictionaries(KEYS, VALUES, max_size=3)


def plain(node: TreeNode) -> Any:
    if isinstance(node.children, dict):
        return {key: plain(each) for key, each in node.children.items()}
    if node.children is not None:
        return [plain(each) for each in node.children]
    return node.setting.value


def folded(*contents: dict[Any, Any]) -> Fold:
    return fold(
        FileLayer(content, Lines(), Origin(file=f"file{number}"))
        for number, content in enumerate(contents)
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(CONTENTS, min_size=1, max_size=4))
# A section over a reference: the copy, and what the copy was made of.
@example([{"a": {"x": 1}, "b": "${a}"}, {"b": {"y": 2}}])
@example([{"a": {"x": 1}, "b": "${a}"}, {"b": {"y": 2}}, {"b": {"x": 3}, "a": {"z": 4}}])
@example([{"a": {"x": {"z": 1}}, "b": {"c": "${..a.x}"}}, {"b": {"c": {"y": 2}}}])
@example([{"a": [1], "b": "${a}", "c": "${b}"}, {"c": [2]}])
@example([{"a": {"x": 1}, "b": "${a}"}, {"b": 5}])
@example([{"a": {"x": 1}, "b": "${a}"}, {"b": "???"}])
@example([{"a": "${b}", "b": {"c": 1}, "c": "${a}"}, {"c": {"d": 2}}])
def test_files_on_each_other_are_what_omegaconf_makes_of_them(contents: list[Any]) -> None:
    config = OmegaConf.create()
    try:
        for content in contents:
            config.merge_with(OmegaConf.create(content))
        expected = OmegaConf.to_container(config, resolve=False)
    except (OmegaConfBaseException, TypeError, RecursionError):
        # What cannot be merged is refused before anybody asks where it comes from.
        return

    assert plain(folded(*contents).root) == expected


@settings(max_examples=300, deadline=None)
@given(CONTENTS, st.lists(st.tuples(st.lists(KEYS, min_size=1, max_size=3), VALUES), max_size=3))
@example({"a": {"x": 1}, "b": "${a}"}, [(["b", "x"], 2)])
@example({"a": {"x": {"z": 1}}, "b": {"c": "${..a}"}}, [(["b", "c", "x", "z"], 2)])
@example({"a": {"x": 1}, "b": "${a}"}, [(["b"], {"y": 2})])
@example({"a": 1}, [(["a", "x"], 2), (["a"], {"y": {"z": 3}}), (["a", "y"], {"w": "???"})])
@example({"a": [{"x": 1}, 2]}, [(["a", "0", "x"], 3), (["a", "1"], {"y": 4})])
def test_overrides_are_what_omegaconf_makes_of_them(content: Any, overrides: list[Any]) -> None:
    config = OmegaConf.create(content)
    layers = [
        FileLayer(content, Lines(), Origin(file="file")),
        *(OverrideLayer(tuple(place), value, Origin(override="it")) for place, value in overrides),
    ]
    try:
        for place, value in overrides:
            OmegaConf.update(config, ".".join(place), value, merge=True, force_add=True)
        expected = OmegaConf.to_container(config, resolve=False)
    except (OmegaConfBaseException, TypeError, RecursionError, ValueError):
        return

    assert plain(fold(layers).root) == expected


def history(setting: Setting | None) -> list[tuple[object, str]]:
    found = []
    while setting is not None:
        found.append((setting.value, str(setting.origin)))
        setting = setting.before
    return found


def setting(folded: Fold, *place: Any) -> Setting:
    node = folded.root.at(place)
    assert node is not None
    return node.setting


def test_a_value_remembers_what_it_replaced_down_to_the_first() -> None:
    found = folded({"a": {"b": 1}}, {"a": {"b": 2}}, {"a": {"c": 0}}, {"a": {"b": 2}})

    assert history(setting(found, "a", "b")) == [(2, "file3"), (2, "file1"), (1, "file0")]


def test_what_is_to_be_set_is_replaced_and_replaces_nothing() -> None:
    found = folded({"a": "???"}, {"a": 1}, {"a": "???"})

    assert history(setting(found, "a")) == [(1, "file1"), ("???", "file0")]


def test_each_key_of_a_section_that_replaced_a_null_says_so() -> None:
    found = folded({"a": None}, {"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}, "d": 3}})

    assert history(setting(found, "a", "b", "c")) == [(2, "file2"), (1, "file1"), (None, "file0")]
    assert history(setting(found, "a", "d")) == [(3, "file2")]


def test_a_null_says_that_it_replaced_a_section() -> None:
    found = folded({"a": {"b": 1}}, {"a": None})

    assert history(setting(found, "a")) == [(None, "file1"), (SECTION, "file0")]


def test_items_of_a_list_come_from_its_last_file_or_from_an_override_of_one() -> None:
    layers = [
        FileLayer({"a": [{"b": 1}]}, Lines(), Origin(file="file0")),
        FileLayer({"a": [{"b": 2}, {"b": 3}]}, Lines(), Origin(file="file1")),
        OverrideLayer(("a", "1", "b"), 4, Origin(override="a.1.b=4")),
    ]
    found = fold(layers)

    assert history(setting(found, "a", 0, "b")) == [(2, "file1"), ([{"b": 1}], "file0")]
    assert history(setting(found, "a", 1, "b"))[:2] == [(4, "command line"), (3, "file1")]


def test_a_deleted_key_is_known_with_the_override_that_deleted_it() -> None:
    layer = OverrideLayer(("a", "b"), None, Origin(override="~a.b"), is_deletion=True)
    found = fold([FileLayer({"a": {"b": 1, "c": 2}}, Lines(), Origin(file="file0")), layer])

    assert plain(found.root) == {"a": {"c": 2}}
    assert found.removed == {("a", "b"): Origin(override="~a.b")}


TEXT = """\
# a comment
anchor: &one
  deep: 1
alias: *one
merged:
  <<: *one
  own: 2
several:
  <<: [*one, {deep: 0, other: 3}]
list:
  - first
  - {inline: 1,
     second: 2}
"quoted key": 1
block: |
  text
last: 1
"""


@pytest.mark.parametrize(("place", "line"), [
    (("anchor", "deep"), 3), (("alias",), 4), (("alias", "deep"), 3), (("merged", "deep"), 3),
    (("merged", "own"), 7), (("several", "deep"), 3), (("several", "other"), 9),
    (("list",), 10), (("list", 0), 11), (("list", 1, "second"), 13), (("quoted key",), 14),
    (("block",), 15), (("last",), 17),
])  # fmt: skip
def test_a_key_stands_where_its_name_is_written(place: tuple[Any, ...], line: int) -> None:
    found = parse_lines(TEXT)
    for part in place:
        found = found.below(part)

    assert found.line == line
