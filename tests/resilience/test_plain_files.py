"""Only plain files are read and written, whatever somebody has put where a file is expected."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from launcher import rundir
from resilience import whole_files
from resilience.events import EventFile
from resilience.plain_files import (
    PLAIN_BYTES_MAX,
    open_plain,
    parse_json,
    read_plain,
    read_plain_text,
)
from resilience.whole_files import draft_of, replace_text, write_first

ROOT = Path(__file__).parents[2]


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_APPEND | os.O_CREAT]
)
def test_what_is_no_plain_file_is_neither_waited_for_nor_opened(
    tmp_path: Path, kind: str, flags: int
) -> None:
    KINDS[kind](path := tmp_path / "file")

    with pytest.raises(OSError, match="file"):
        open_plain(path, flags)


def test_a_link_is_followed_to_be_read_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "link").symlink_to(tmp_path / "file")

    assert read_plain(tmp_path / "link") == b"theirs"
    with pytest.raises(OSError, match="link"):
        EventFile(tmp_path / "link")
    assert (tmp_path / "file").read_text() == "theirs"


@pytest.mark.parametrize("read", [read_plain, read_plain_text])
def test_what_is_too_large_is_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with (path := tmp_path / "odd").open("wb") as file:
        file.truncate(10 << 30)

    with pytest.raises(OSError, match=f"has 10737418240 bytes; allowed: at most {PLAIN_BYTES_MAX}"):
        read(path)


@pytest.mark.parametrize(
    "text",
    ["Infinity", "-Infinity", "NaN", "1e999", f"1{'0' * 400}", "18446744073709551616", "[" * 10**5],
)
def test_json_that_no_program_can_use_is_broken(text: str) -> None:
    with pytest.raises(ValueError, match=r"finite|64 bits|deep"):
        parse_json(f'{{"a": {text}}}' if text[0] != "[" else text)


def test_json_has_numbers_of_64_bits() -> None:
    assert parse_json(b"[18446744073709551615, -9223372036854775808, 1e308]") == [
        (1 << 64) - 1,
        -(1 << 63),
        1e308,
    ]


WRITERS: dict[str, Callable[[Path], object]] = {
    "replace_text": lambda path: replace_text(path, "ours", str(os.getpid())),
    "write_first": lambda path: write_first(path, {}, str(os.getpid())),
    "rundir": lambda path: rundir.write_whole(path, "ours"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_draft_overwrites_nothing_that_has_its_name(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knew the draft's name would put a link to another's file there."""
    path, theirs = tmp_path / "report.html", tmp_path / "theirs"
    theirs.write_text("theirs")
    drafts = (draft_of(path, str(os.getpid())), draft_of(path, str(os.getpid())))
    assert drafts[0] != drafts[1]
    for module in (whole_files, rundir):
        monkeypatch.setattr(module, "draft_of", lambda *_: drafts[0])
    drafts[0].symlink_to(theirs)

    # `write_first` says so by its answer.
    with nullcontext() if writer == "write_first" else pytest.raises(FileExistsError):
        assert not WRITERS[writer](path)

    assert not path.exists()
    assert theirs.read_text() == "theirs"


# Folders of the user alone (0700): no name in them is somebody else's.
PRIVATE = {
    "resilience/tiered/memoryd/peer_origins.py", "resilience/tiered/memoryd/http_spaces.py",
    "resilience/tiered/arena.py", "resilience/tiered/namespaces.py", "resilience/data/states.py",
    "recipes_training/weights/export.py",
    # Of the kernel or of this process.
    "resilience/agent/processes/zygote.py", "launcher/__main__.py",
}  # fmt: skip


def overwriting(path: Path) -> list[int]:
    """Return the lines on which a module opens a file that somebody may have put there."""
    lines = []
    text = path.read_text()
    may_write = re.search(r"open\(.*\"[wa]|write_text\(|write_bytes\(", text)
    for node in ast.walk(ast.parse(text)) if may_write else ():
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        words = [each.value for each in node.args if isinstance(each, ast.Constant)]
        opens = name == "open" and any(
            isinstance(word, str) and set(word) <= set("wab+") and set(word) & set("wa")
            for word in words
        )
        is_plain = any(each.arg == "opener" for each in node.keywords)
        is_path = isinstance(node.func, ast.Attribute) and name in ("write_text", "write_bytes")
        if (opens and not is_plain) or is_path:
            lines.append(node.lineno)
    return lines


def test_nothing_is_written_over_a_name_that_is_not_looked_at() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{lines}"
        for package in ("launcher", "resilience", "recipes_training")
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in PRIVATE and (lines := overwriting(path))
    }

    assert found == set()
