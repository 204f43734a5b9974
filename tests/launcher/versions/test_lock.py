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
    content=st.sampled_from(["", "ab" * 32, "1" * 64]),
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
        (f"a: &a\n- {ROW}\nb: *a", "lock, line 3: allowed: rows of versions, without aliases"),
        ("[" * 3000, "lock, line 1: allowed: rows of versions, without aliases"),
        ("a: 3", "lock: a: 3: allowed: a mapping of version, digest, schema, date, change"),
        (f"a:\n- {ROW}\n- {ROW}", "lock: a: versions [1, 1]; allowed: each once, in order"),
        (f"a:\n- {ROW.replace('version: 1', 'version: 0')}", "lock: a: version 0: allowed"),
        (f"a:\n- {ROW.replace('ab' * 32, 'xyz')}", "lock: a: digest 'xyz': allowed"),
        ("a:\n- " + ROW.replace("why", r'"x\na@9"'), r"lock: a: change 'x\na@9': allowed"),
        (f"a:\n- {ROW.replace('schema', 'content: 7, schema')}", "lock: a: content 7: allowed"),
        (f"a:\n- {ROW.replace('2026-03-01', 'May')}", "lock: a: date 'May': allowed: YYYY-MM-DD"),
        (f"a:\n<<<<<<< ours\n- {ROW}", "a merge that is not ended"),
    ],
)
def test_a_lock_that_says_nothing_clear_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_lock(text, "lock")

    assert message in str(caught.value)


class Branches:
    """A lock of three recipes in a repository, changed on two branches that then meet."""

    def __init__(self, folder: Path, *config: str) -> None:
        self.path = folder / "recipes.lock"
        self._config = config
        self._first = {name: (version(1),) for name in ("a/a", "b/b", "c/c")}
        self._git("init", "-q", "-b", "main")
        self.path.write_text(format_lock(self._first))
        self._git("add", ".")
        self._git("commit", "-qm", "first")

    def merge(self, ours: str, theirs: str) -> str:
        """Raise a recipe's version on each branch; return what is said of the merge."""
        self._git("switch", "-qc", "other")
        self._commit(theirs, "theirs")
        self._git("switch", "-q", "main")
        self._commit(ours, "ours")
        self._git("merge", "other", status=1)
        with pytest.raises(RecipeError) as caught:
            parse_lock(self.path.read_text(), self.path)
        return str(caught.value)

    def _commit(self, name: str, change: str) -> None:
        number = 2 if name in self._first else 1
        self.path.write_text(format_lock(with_version(self._first, name, version(number, change))))
        self._git("commit", "-qam", change)

    def _git(self, *words: str, status: int = 0) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e@localhost", *self._config)
        done = subprocess.run(["git", *identity, *words], cwd=self.path.parent, capture_output=True)
        assert done.returncode == status, done


@pytest.mark.parametrize("style", ["merge", "diff3"])
def test_two_branches_that_raise_one_version_meet_in_a_conflict(tmp_path: Path, style: str) -> None:
    told = Branches(tmp_path, "-c", f"merge.conflictStyle={style}").merge("b/b", "b/b")

    assert "b/b has two versions 2; keep one branch's line" in told
    assert "raise recipe.version in the other's recipe by one" in told
    assert "a/a" not in told


@pytest.mark.parametrize("style", ["merge", "diff3"])
def test_two_branches_that_add_other_recipes_keep_both_lines(tmp_path: Path, style: str) -> None:
    branches = Branches(tmp_path, "-c", f"merge.conflictStyle={style}")

    told = branches.merge("b/new", "b/other")

    assert told.endswith("have lines of other recipes or versions; keep those of both")
    kept = "".join(
        line for line in branches.path.read_text().splitlines(keepends=True)
        if not line.startswith(("<<<<<<<", "=======", ">>>>>>>", "|||||||"))
    )  # fmt: skip
    found = {name: len(rows) for name, rows in parse_lock(kept, "lock").items()}
    assert found == dict.fromkeys(("a/a", "b/b", "b/new", "b/other", "c/c"), 1)


@pytest.mark.parametrize(("before", "after", "told"), [
    ("date: '2026-03-01'", "date: 2026-13-40", "month must be in 1..12"),
    ("version: 1", f"version: {'9' * 5000}", "found a number of 5000 characters"),
])  # fmt: skip
def test_a_value_that_python_cannot_take_is_told_with_its_file(
    before: str, after: str, told: str
) -> None:
    text = format_lock({"a/b": (version(1),)})
    assert before in text

    with pytest.raises(RecipeError, match=rf"^the lock.*: broken YAML: {told}"):
        parse_lock(text.replace(before, after), "the lock")
