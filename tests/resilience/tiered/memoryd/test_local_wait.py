"""Waiting for a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.tiered.memoryd.local import SOCKET_NAME
from tests.resilience.tiered.asked import ask, end, spawn
from tests.resilience.tiered.daemons import Daemon
from tests.tokens import write_token


def test_it_ends_when_a_daemon_answers(tmp_path: Path) -> None:
    folder = tmp_path / "arena"
    with Daemon(folder=folder) as daemon:
        waiting = spawn("wait", "--dir", folder, "--timeout-s", "60")
        daemon.start()
        assert end(waiting) == (0, "", "")
        assert ask("wait", MEMORYD_DIR=str(folder)) == (0, "", "")


def test_a_daemon_that_was_killed_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "arena"
    with Daemon(folder=folder).start() as daemon:
        daemon.kill()
        assert (folder / SOCKET_NAME).exists()
        status, output, errors = ask("wait", "--dir", folder, "--timeout-s", "0.2")
    assert (status, output) == (1, "")
    assert f"no daemon has answered in {folder} within 0.2 s" in errors
    assert "Connection refused" in errors


def test_one_that_asks_for_a_token_has_answered(tmp_path: Path) -> None:
    write_token(tmp_path / "token")
    write_token(tmp_path / "other", "that of another run")
    folder = tmp_path / "arena"
    with Daemon(folder=folder, options=("--token-file", str(tmp_path / "token"))).start():
        assert ask("wait", "--dir", folder)[0] == 0
        variables = {"MEMORYD_TOKEN_FILE": str(tmp_path / "token")}
        assert ask("wait", "--dir", folder, **variables)[0] == 0
        wrong = ask("wait", "--dir", folder, "--token-file", tmp_path / "other")
    assert wrong == (1, "", "resilience.tiered: wrong token\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param([], "arguments are required: COMMAND", id="nothing"),
        pytest.param(["wait", "--timeout-s", "0"], "--timeout-s: '0': Input should be", id="zero"),
        pytest.param(["wait", "--timeout-s", "x"], "--timeout-s: 'x': Input should be", id="text"),
        pytest.param(["wait", "--token-file", "/no"], "--token-file: '/no' cannot be", id="token"),
        pytest.param(["wait", "--dri", "/"], "unrecognized arguments: --dri", id="mistyped"),
    ],
)
def test_wrong_options(words: list[str], message: str) -> None:
    status, output, errors = ask(*words)

    assert (status, output) == (2, "")
    assert message in errors
    assert "Traceback" not in errors


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    status, _, errors = ask("wait", "--dir", tmp_path / "none", "--timeout-s", "0.1")

    assert status == 1
    assert f"no daemon has answered in {tmp_path / 'none'} within 0.1 s" in errors
