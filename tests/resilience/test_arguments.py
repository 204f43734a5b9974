"""A token's file is one that nobody else may read, and what it holds cannot be guessed."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from resilience.arguments import read_token
from tests.tokens import TOKEN, write_token


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_token_of_ones_own_is_read(tmp_path: Path, mode: int) -> None:
    write_token(tmp_path / "token", f"{TOKEN}\n").chmod(mode)

    assert read_token(str(tmp_path / "token")) == TOKEN


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o604, 0o640, 0o660, 0o440, 0o700])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    write_token(tmp_path / "token").chmod(mode)

    with pytest.raises(ArgumentTypeError, match=f"has mode {mode:04o}; allowed: 0600 or 0400"):
        read_token(str(tmp_path / "token"))


@pytest.mark.parametrize(("mode", "is_taken"), [(0o400, True), (0o440, True), (0o444, False)])
def test_a_mounted_secret_may_be_read_by_its_fs_group(
    tmp_path: Path, mode: int, is_taken: bool
) -> None:
    """Laid out as the kubelet does it."""
    (tmp_path / "..2026_11_28").mkdir()
    write_token(tmp_path / "..2026_11_28" / "token").chmod(mode)
    (tmp_path / "..data").symlink_to("..2026_11_28")
    (tmp_path / "token").symlink_to("..data/token")

    if is_taken:
        assert read_token(str(tmp_path / "token")) == TOKEN
    else:
        with pytest.raises(ArgumentTypeError, match="has mode 0444"):
            read_token(str(tmp_path / "token"))


@pytest.mark.parametrize("text", ["", "\n", "x", "x" * 15, "x" * 15 + "\n", "x" * 5000])
def test_a_token_of_another_length_is_refused(tmp_path: Path, text: str) -> None:
    write_token(tmp_path / "token", text)

    with pytest.raises(ArgumentTypeError, match="allowed for a token: 16 to 4096"):
        read_token(str(tmp_path / "token"))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)

    with pytest.raises(ArgumentTypeError, match="is no plain file"):
        read_token(str(tmp_path / "token"))


def test_no_text_of_ours_has_a_token_in_a_command() -> None:
    """Whoever lists processes sees the arguments of all of them."""
    root = Path(__file__).parents[2]
    texts = [path for name in ("launcher", "docs", "templates", "README.md")
             for path in (root / name, *(root / name).rglob("*")) if path.is_file()]  # fmt: skip

    assert [path for path in texts if b"--from-literal" in path.read_bytes()] == []
