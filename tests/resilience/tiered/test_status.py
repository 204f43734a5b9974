"""The command that tells of checkpoints, and waiting for a daemon."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.memoryd.local import SOCKET_NAME
from resilience.tiered.status import WIDTH, Told, find_folders, render_status, show_bytes
from tests.resilience.tiered.asked import ask
from tests.resilience.tiered.daemons import LIMIT_S, MIB, ROOT, Daemon, make_content, make_id, save
from tests.tokens import write_token


def test_status_tells_which_steps_are_where(tmp_path: Path) -> None:
    folder = tmp_path / "arena"
    with Daemon(folder=folder, options=["--keep", "3", "--node", "n0"]).start() as daemon:
        client = daemon.client()
        save(client, make_id(7), make_content(MIB, 7))
        save(client, make_id(12), make_content(MIB, 12), num_shards=2)

        status, output, errors = ask("status", "--dir", folder)
        of_variable = ask("status", MEMORYD_DIR=str(folder))
        as_json = ask("status", "--dir", folder, "--json")

    assert (status, errors) == (0, "")
    assert of_variable[:2] == (0, output)
    assert output.endswith(
        "namespace run of job job\n"
        "  step  generation  complete  size     in memory of (shards)  store\n"
        "  12    0           no        1.0 MiB  n0 1/2                 -\n"
        "    1 of 2 shards\n"
        "  7     0           yes       1.0 MiB  n0 1/1                 -\n"
    )
    assert "n0 (n0)" in output
    assert "2.0 MiB held of 16.0 MiB, sees no other node" in " ".join(output.split())
    (told,) = json.loads(as_json[1])["daemons"]
    assert told["dir"] == str(folder)
    assert [each["step"] for each in told["jobs"]["run"]["steps"]] == [12, 7]


@pytest.mark.parametrize(
    ("stalled_s", "text"),
    [(None, "answers"), (7.9, "answers"), (12.3, "has not answered for 12 s")],
)
def test_store_that_says_nothing_does_not_answer(stalled_s: float | None, text: str) -> None:
    store = {"name": "s3:bucket", "failing_s": None, "last_error": None, "stalled_s": stalled_s}

    assert f"\nstore s3:bucket {text}\n" in render_status([told("/a", "a", {}, store)])


def test_two_nodes_daemons_tell_of_a_job_once(tmp_path: Path) -> None:
    step = {
        "step": 3, "generation": 0, "num_shards": 4, "num_bytes": 3 << 30, "shards_here": [],
        "ram": {"a": 4, "b": 4}, "store": 2, "tiers": ["ram"], "is_complete": True,
        "is_stale": False, "reason": "complete",
    }  # fmt: skip
    lag = {"num_shards": 2, "num_bytes": 1 << 30, "seconds": 4.25}
    nothing = {"num_shards": 0, "num_bytes": 0, "seconds": 0.0}
    job = {"job": "j", "lag": {"peers": nothing, "store": lag}, "steps": [step]}
    store = {"name": "s3:bucket", "failing_s": 12.0, "last_error": "503 Slow Down"}

    output = render_status(
        [told("/a", "a", {"run": job}, store), told("/b", "b", {"run": job}, store)]
    )

    assert output == (
        "/a: a (rack), process 1, 2.0 GiB held of 4.0 GiB, sees b\n"
        "store s3:bucket has failed for 12 s: 503 Slow Down\n"
        "/b: b (rack), process 1, 2.0 GiB held of 4.0 GiB, sees a\n"
        "store s3:bucket has failed for 12 s: 503 Slow Down\n"
        "\n"
        "namespace run of job j\n"
        "  on the way to the store: 2 shards, 1.0 GiB, for 4.2 s\n"
        "  in the store: no step of 3\n"
        "  step  generation  complete  size     in memory of (shards)  store\n"
        "  3     0           yes       3.0 GiB  a 4/4, b 4/4           2/4\n"
    )


def told(folder: str, node: str, jobs: dict[str, Any], store: Any = None) -> Told:
    return Told(
        folder=Path(folder),
        reply={
            "node": node, "domain": "rack", "pid": 1, "held_bytes": 2 << 30,
            "budget_bytes": 4 << 30, "store": store, "nodes": {"a": "rack", "b": "rack"},
            "jobs": jobs,
        },
    )  # fmt: skip


def test_no_line_is_too_long() -> None:
    names = [f"node-{number:03d}.cluster" for number in range(300)]
    step = {
        "step": 10**12 - 1, "generation": 123456, "num_shards": 2400, "num_bytes": 1 << 50,
        "shards_here": [], "ram": dict.fromkeys(names, 16), "store": 1200, "tiers": [],
        "is_complete": False, "is_stale": True, "reason": "stale, " + "as it is, " * 40,
    }  # fmt: skip
    lag = {"num_shards": 10**6, "num_bytes": 1 << 60, "seconds": 1e6}
    job = {"job": "j" * 60, "lag": {"peers": lag, "store": lag}, "steps": [step]}
    each = told("/dev/shm/" + "x" * 60, names[0], {"n" * 60: job})
    each.reply["nodes"].update(dict.fromkeys(names, "rack"))  # type: ignore[attr-defined]

    lines = render_status([each]).splitlines()

    assert max(map(len, lines)) <= WIDTH
    assert any("node-000.cluster 16/2400 and 299 more" in line for line in lines)


def test_bytes_are_shown_in_the_unit_that_reads_best() -> None:
    shown = [show_bytes(each) for each in (0, 1023, 1024, 1536, 5 << 20, 7 << 30, 3 << 40)]

    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "7.0 GiB", "3.0 TiB"]


def test_daemons_of_this_user_are_found(tmp_path: Path) -> None:
    for name in ("b", "a", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "none" / SOCKET_NAME).touch()
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.bind(str(tmp_path / "a" / SOCKET_NAME))
        second.bind(str(tmp_path / "b" / SOCKET_NAME))

        assert find_folders(tmp_path) == [tmp_path / "a", tmp_path / "b"]


def test_who_has_no_token_is_told_where_it_is(tmp_path: Path) -> None:
    write_token(tmp_path / "token")
    folder = tmp_path / "arena"
    with Daemon(folder=folder, options=["--token-file", str(tmp_path / "token")]).start():
        refused = ask("status", "--dir", folder)
        told = ask("status", "--dir", folder, "--token-file", tmp_path / "token")

    assert refused[:2] == (1, "")
    assert f"{folder}: wrong token; --token-file names the file" in refused[2]
    assert (told[0], told[2]) == (0, "")


def test_a_daemon_that_is_not_there_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    with Daemon(folder=tmp_path / "there").start() as daemon:
        words = ("--dir", tmp_path / "gone", "--dir", tmp_path / "there")
        status, output, errors = ask("status", *words)
        daemon.end(signal.SIGTERM)
        ended = ask("status", "--dir", tmp_path / "there")

    assert status == 1
    assert str(tmp_path / "there") in output
    assert "no checkpoint yet" in output
    assert f"{tmp_path / 'gone'}: no daemon answers" in errors
    assert (ended[0], ended[1]) == (1, "")
    assert str(tmp_path / "there") in ended[2]


def test_it_ends_when_a_daemon_answers(tmp_path: Path) -> None:
    folder = tmp_path / "arena"
    with Daemon(folder=folder) as daemon:
        words = [sys.executable, "-m", "resilience.tiered", "wait", "--dir", folder]
        waiting = subprocess.Popen([*words, "--timeout-s", "60"], env={"PYTHONPATH": str(ROOT)})
        daemon.start()
        assert waiting.wait(LIMIT_S) == 0
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
def test_wrong_options_are_refused(words: list[str], message: str) -> None:
    status, output, errors = ask(*words)

    assert (status, output) == (2, "")
    assert message in errors
