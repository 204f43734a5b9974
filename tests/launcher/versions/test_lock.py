"""The lock's text: what is read, what is refused, and how branches meet in it."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import RecipeError
from launcher.versions.lock import Version, format_lock, parse_lock, with_version

DAY = datetime.date(2026, 3, 1)


def version(number: int, change: str = "why", digest: str = "ab" * 32) -> Version:
    return Version(version=number, digest=digest, schema=1, date=DAY, change=change)


versions = st.builds(
    Version,
    version=st.integers(1, 99),
    digest=st.text("0123456789abcdef", min_size=64, max_size=64),
    schema=st.just(1),
    date=st.dates(),
    change=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]+/[a-z0-9_]+", fullmatch=True), versions, max_size=4))
def test_a_lock_is_read_as_it_was_written(found: dict[str, Version]) -> None:
    lock = {name: (each,) for name, each in found.items()}

    assert parse_lock(format_lock(lock), "recipes.lock") == lock


ROW = f"{{version: 1, digest: {'ab' * 32}, schema: 1, date: '2026-03-01', change: why}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "lock, line 1: broken YAML"),
        ("- a", "lock: allowed: a mapping of recipes' names"),
        ("a: 3", "lock: a: 3: allowed: a mapping of version, digest, schema, date, change"),
        (f"a:\n- {ROW}\n- {ROW}", "lock: a: versions [1, 1]; allowed: each once, in order"),
        (f"a:\n- {ROW.replace('version: 1', 'version: 0')}", "lock: a: version 0: allowed"),
        (f"a:\n- {ROW.replace('ab' * 32, 'xyz')}", "lock: a: digest 'xyz': allowed"),
        (f"a:\n- {ROW.replace('2026-03-01', 'May')}", "lock: a: date 'May': allowed: YYYY-MM-DD"),
        (f"a:\n<<<<<<< ours\n- {ROW}", "a merge that is not ended"),
    ],
)
def test_a_lock_that_says_nothing_clear_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_lock(text, "lock")

    assert message in str(caught.value)


def test_two_branches_that_raise_one_version_meet_in_a_conflict(tmp_path: Path) -> None:
    def git(*words: str, status: int = 0) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e@localhost")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True)
        assert done.returncode == status, done

    def commit(number: int, change: str) -> None:
        path.write_text(format_lock(with_version(first, "b/b", version(number, change))))
        git("commit", "-qam", change)

    path = tmp_path / "recipes.lock"
    first = {name: (version(1),) for name in ("a/a", "b/b", "c/c")}
    git("init", "-q", "-b", "main")
    path.write_text(format_lock(first))
    git("add", ".")
    git("commit", "-qm", "first")
    git("switch", "-qc", "other")
    commit(2, "theirs")
    git("switch", "-q", "main")
    commit(2, "ours")

    git("merge", "other", status=1)

    with pytest.raises(RecipeError, match=r"raise recipe\.version of the other's recipe"):
        parse_lock(path.read_text(), path)
