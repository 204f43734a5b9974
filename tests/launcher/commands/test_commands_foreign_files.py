"""Commands on runs in a folder where somebody has put what is no file, or has a name that obeys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.terminal import printable
from tests.launcher import command
from tests.launcher.command import launch, put
from tests.launcher.local_job import write_run

EVIL = "run\x1b]0;owned\x07\u202e\x9b2J"


@pytest.fixture(autouse=True)
def _ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TIMEOUT_S", 60)


OTHERS = ["cancelled.json", "size.json", "launcher.lock", "recipe.yaml", "record/run.json",
          "logs/node-0.log"]  # fmt: skip


@pytest.mark.parametrize("names", [["events.jsonl"], ["job.json"], ["submitted.json"], OTHERS])
def test_no_command_waits_for_a_pipe_in_a_runs_folder(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "runs").mkdir()
    for each in (folder := tmp_path / "runs" / "a", tmp_path / "runs" / "b"):
        write_run(each, ":")
        (each / "events.jsonl").touch()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    every = launch("runs", folder=tmp_path)
    one = [launch(word, "a", folder=tmp_path) for word in ("status", "logs", "report", "continue")]

    assert [line.split()[0] for line in every.out.splitlines()] == ["a", "b"]
    assert all(0 <= each.status <= 2 for each in (every, *one)), one
    assert not any("Traceback" in each.err for each in (every, *one))
    if names != OTHERS:
        assert "is no plain file" in every.out
        assert "plain file" in one[0].out + one[0].err or one[0].status


@pytest.mark.parametrize("words", [
    ["runs"], ["status", f"runs/{EVIL}"], ["report", f"runs/{EVIL}"], ["clean", f"runs/{EVIL}"],
    [f"recipe={EVIL}"], ["recipe=llama/llama3_tiny_pretrain", f"run.dir='{EVIL}'"], ["check"],
], ids=lambda words: ascii(words[0])[:12])  # fmt: skip
def test_no_name_reaches_the_terminal_as_a_command_to_it(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs" / EVIL, ":")
    (tmp_path / "runs" / EVIL / "events.jsonl").touch()
    put(tmp_path / "recipes" / f"{EVIL}.yaml", "a: 1")

    ended = launch(*words, folder=tmp_path)

    assert printable(said := ended.out + ended.err) == said
    assert "owned" in said


def test_what_is_printable_stays_as_it_is() -> None:
    assert printable("a \u2014 \xfc\n\tb") == "a \u2014 \xfc\n\tb"
    assert printable("\x1b[2J\r\x07\udc80") == r"\x1b[2J\r\x07\udc80"
