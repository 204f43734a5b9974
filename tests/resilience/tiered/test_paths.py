"""Names of objects: what may be one, and that each is read back as what it was made from."""

from __future__ import annotations

import posixpath
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilience.tiered.paths import (
    SHARD_CHARS_MAX,
    STEP_MAX,
    check_namespace,
    data_key,
    parse_data_key,
    parse_step_key,
    step_key,
    step_prefix,
)
from resilience.tiered.shard import ShardId

DIGEST = "0123456789abcdef0123456789abcdef"
ALLOWED = "want 1 to 200 letters, digits, '.', '_' or '-', the first of them no '.'"
NAMESPACES = st.from_regex(
    re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,199}", re.ASCII), fullmatch=True
)
ODD_PIECES = st.sampled_from([
    "..", ".", "/", "\\", "%2e", "%2F", "!2E", "!", "~", "\0", "\n", " ", "a", "data", "steps", "0",
    "\u00e9", "\u2024", "\uff0e", "\u0661", "\ud800", "json", ".json", "-g1", "000000000001",
])  # fmt: skip
ODD_TEXT = st.one_of(st.text(max_size=30), st.lists(ODD_PIECES, max_size=8).map("".join))
SHARDS = st.one_of(st.text(max_size=20), ODD_TEXT.filter(lambda text: "\ud800" not in text))
IDS = st.builds(
    ShardId,
    namespace=NAMESPACES,
    step=st.integers(0, STEP_MAX),
    generation=st.integers(-1, 10**6),
    shard=SHARDS,
)


def shard_id(**changes: object) -> ShardId:
    values = {"namespace": "run", "step": 7, "generation": 2, "shard": "0", **changes}
    return ShardId(**values)  # type: ignore[arg-type]


def is_inside(key: str) -> bool:
    """The key, put below a folder, stays there and is a plain file's name in each part."""
    joined = posixpath.normpath(posixpath.join("/folder", key))
    parts = key.split("/")
    return (
        joined == f"/folder/{key}"
        and all(part and not part.startswith(".") and len(part) <= 255 for part in parts)
        and re.fullmatch(r"[A-Za-z0-9._!/-]+", key) is not None
    )


@pytest.mark.parametrize(
    "namespace", ["a", "Z", "0", "_", "-", "a.b", "a..b", "run-1_x.y", "x" * 200]
)
def test_namespaces_that_are_allowed(namespace: str) -> None:
    assert check_namespace(namespace) == namespace


@pytest.mark.parametrize(
    "namespace",
    [
        *("", ".", "..", ".a", "a/b", "../a", "a/..", "a\\b", "a b", "a\n", "\na", "a\0"),
        *("\u00e9", "\u0661", "\uff0e\uff0e", "a%2e", "a!b", "~", "a:b", "a*", "x" * 201),
    ],
)
def test_namespaces_that_are_not_allowed(namespace: str) -> None:
    with pytest.raises(ValueError, match=re.escape(ALLOWED)) as caught:
        check_namespace(namespace)

    assert ascii(namespace)[:50] in str(caught.value)


@given(ODD_TEXT)
def test_a_namespace_is_refused_or_stays_in_its_folder(text: str) -> None:
    try:
        keys = [data_key(text, DIGEST), step_key(shard_id(namespace=text))]
    except ValueError:
        assert not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", text)
        return

    assert all(is_inside(key) and key.startswith(f"{text}/") for key in keys)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "run/steps/000000000007-g2/0.json"),
        ({"shard": ""}, "run/steps/000000000007-g2/!.json"),
        ({"shard": "!"}, "run/steps/000000000007-g2/!21.json"),
        ({"shard": ".."}, "run/steps/000000000007-g2/!2E..json"),
        ({"shard": "a/b.c"}, "run/steps/000000000007-g2/a!2Fb.c.json"),
        ({"shard": "\u00e9"}, "run/steps/000000000007-g2/!C3!A9.json"),
        ({"step": 0, "generation": -1}, "run/steps/000000000000-g-1/0.json"),
        ({"step": STEP_MAX}, "run/steps/999999999999-g2/0.json"),
    ],
)
def test_names_of_shards(changes: dict[str, object], key: str) -> None:
    assert step_key(shard_id(**changes)) == key
    assert parse_step_key(key) == shard_id(**changes)


def test_names_of_data() -> None:
    key = data_key("run", DIGEST)

    assert key == f"run/data/{DIGEST}"
    assert parse_data_key(key) == ("run", DIGEST)


@given(IDS)
@example(shard_id(shard="!."))
@example(shard_id(shard="..json"))
@example(shard_id(shard="x" * SHARD_CHARS_MAX))
def test_each_shard_is_read_back_and_stays_in_its_folder(id_: ShardId) -> None:
    key = step_key(id_)

    assert parse_step_key(key) == id_
    assert is_inside(key)
    assert key.startswith(f"{id_.namespace}/steps/")
    assert key.count("/") == 3


@given(st.integers(0, STEP_MAX), st.integers(0, STEP_MAX))
def test_later_steps_sort_later(one: int, other: int) -> None:
    assert (step_prefix("run", one, 1) < step_prefix("run", other, 1)) == (one < other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": -1}, "step -1 is not allowed; want 0 to 999999999999"),
        ({"step": STEP_MAX + 1}, "step 1000000000000 is not allowed; want 0 to 999999999999"),
        ({"generation": 10**18}, "want at most 18 digits"),
        ({"shard": "x" * 241}, "its name takes 241 characters, want at most 240"),
        ({"shard": "/" * 81}, "its name takes 243 characters, want at most 240"),
        ({"shard": "\ud800"}, r"shard '\ud800' is not allowed; want text of Unicode"),
        ({"namespace": "a/b"}, ALLOWED),
    ],
)
def test_shards_that_have_no_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        step_key(shard_id(**changes))


@pytest.mark.parametrize(
    "digest", ["", "0" * 31, "0" * 33, "A" * 32, "g" * 32, "../" + "0" * 29, DIGEST + "\n"]
)
def test_what_is_no_digest(digest: str) -> None:
    with pytest.raises(ValueError, match="want 32 of 0-9 and a-f"):
        data_key("run", digest)
    with pytest.raises(ValueError, match="want"):
        parse_data_key(f"run/data/{digest}")


@pytest.mark.parametrize("key", [
    "", "run", "run/steps/7-g2/0.json", "run/steps/0000000000007-g2/0.json",
    "run/steps/000000000007-g02/0.json", "run/steps/000000000007-g-0/0.json",
    "run/steps/000000000007-g2/0", "run/steps/000000000007-g2/.json",
    "run/steps/000000000007-g2/..json", "run/steps/000000000007-g2/.a.json",
    "run/steps/000000000007-g2/!41.json", "run/steps/000000000007-g2/!2f.json",
    "run/steps/000000000007-g2/!2.json", "run/steps/000000000007-g2/!FF.json",
    "run/steps/000000000007-g2/!!.json", "run/steps/000000000007-g2/a b.json",
    "run/steps/000000000007-g2/\u00e9.json", "run/steps/000000000007-g2/a/b.json",
    "run/steps/000000000007-g2/0.json\n",
    "run/steps/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667-g2/0.json",
    "../steps/000000000007-g2/0.json", ".run/steps/000000000007-g2/0.json",
    "/run/steps/000000000007-g2/0.json", "x/run/steps/000000000007-g2/0.json",
    "run/data/000000000007-g2/0.json",
])  # fmt: skip
def test_what_names_no_shard(key: str) -> None:
    with pytest.raises(ValueError, match="want"):
        parse_step_key(key)


@given(st.one_of(ODD_TEXT, st.lists(ODD_PIECES, max_size=5).map("/".join)))
def test_only_names_that_are_made_here_are_read(key: str) -> None:
    for parse, make in (
        (parse_step_key, step_key),
        (parse_data_key, lambda parts: data_key(*parts)),
    ):
        try:
            parsed = parse(key)
        except ValueError:
            continue
        assert make(parsed) == key  # type: ignore[operator]
        assert is_inside(key)
