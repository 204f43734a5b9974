"""What the daemon's command line says, and how it is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from resilience.tiered.memoryd.__main__ import main
from resilience.tiered.memoryd.options import default_folder, parse_options
from tests.tokens import TOKEN, write_token


def test_defaults_are_a_local_daemon_in_shared_memory() -> None:
    options = parse_options(["--budget-mib", "1"])

    assert options.folder == default_folder() == Path(f"/dev/shm/memoryd-{os.geteuid()}")
    assert (options.budget_bytes, options.http, options.local.token) == (1 << 20, None, "")
    assert options.local.own.name == options.local.own.domain != ""
    assert not options.remove_on_exit


def test_a_token_is_the_files_text(tmp_path: Path) -> None:
    write_token(tmp_path / "token", f"{TOKEN}\n")

    options = parse_options(["--budget-mib", "1", "--token-file", str(tmp_path / "token")])

    assert options.local.token == TOKEN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param([], "required: --budget-mib", id="no-budget"),
        pytest.param(["--budget-mib", "0"], "--budget-mib: '0': Input should be", id="zero"),
        pytest.param(["--budget-mib", "1.5"], "'1.5': Input should be a valid", id="broken"),
        pytest.param(["--budget-mib", "-1"], "'-1': Input should be greater", id="negative"),
        pytest.param(["--budget-mib", "9" * 9], "is more than the .* MiB of", id="beyond-memory"),
        pytest.param(["--budget-mib", "9" * 99], "Input should be less than or equal", id="huge"),
        pytest.param(["--dir", "x" * 100], "--dir: 'x+' is too long; .* 107 bytes", id="long-dir"),
        pytest.param(["--http", "9200"], "--http: '9200' is not HOST:PORT", id="no-host"),
        pytest.param(["--http", "h:x"], "'h:x' is not HOST:PORT", id="no-port"),
        pytest.param(["--http", "h:0"], "'h:0' is not HOST:PORT", id="port-0"),
        pytest.param(["--http", "h:65536"], "'h:65536' is not HOST:PORT", id="high-port"),
        pytest.param(["--http", "0.0.0.0:1"], "--http: '0.0.0.0' .* --token-file", id="open-http"),
        pytest.param(["--http", "[::]:1"], "'::' can be reached .* --token-file", id="open-v6"),
        pytest.param(
            ["--http-open"], "--http-open: allowed only with --http .* loopback", id="open"
        ),
        pytest.param(
            ["--http", "0.0.0.0:1", "--token-file", "token", "--http-open"],
            "--http-open: allowed only with --http .* loopback",
            id="open-to-all",
        ),
        pytest.param(["--token-file", "gone"], "--token-file: 'gone' cannot be read", id="no-file"),
        pytest.param(
            ["--token-file", "empty"],
            "'empty' holds 0 characters; allowed for a token: 16 to",
            id="empty-file",
        ),
        pytest.param(
            ["--token-file", "large"], "'large' holds 4097 characters; allowed", id="large-file"
        ),
        pytest.param(["--token-file", "binary"], "'binary' cannot be read", id="binary-file"),
        pytest.param(["--connections-max", "0"], "'0': Input should be", id="no-connections"),
        pytest.param(["--idle-s", "nan"], "--idle-s: 'nan': Input should be a finite", id="nan"),
        pytest.param(["--idle-s", "0"], "'0': Input should be greater than 0", id="no-time"),
        pytest.param(["--idle-s", "inf"], "'inf': Input should be a finite", id="for-ever"),
        pytest.param(["--lease-s", "1e7"], "--lease-s: '1e7': at most 1e.06", id="for-years"),
        pytest.param(["--budget", "1"], "unrecognized arguments: --budget", id="abbreviation"),
        pytest.param(["more"], "unrecognized arguments: more", id="word"),
    ],
)
def test_wrong_options_end_with_status_2_and_one_message(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token(tmp_path / "empty", " \n")
    write_token(tmp_path / "large", "x" * 5000)
    write_token(tmp_path / "token")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    needs_budget = words and words[0] not in {"--budget-mib", "--budget"}
    budget = ["--budget-mib", "1"] if needs_budget or "--budget" in words else []

    with pytest.raises(SystemExit) as caught:
        main([*budget, *words])

    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error:" in each]
    assert caught.value.code == 2
    assert re.search(message, line), line
