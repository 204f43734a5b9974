"""Ctrl-C while a run on this machine begins."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher import app
from launcher.__main__ import main
from resilience.events import read_events


def test_interrupt_once_the_files_are_written_is_the_end_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the launcher sets it, for good in its process
    monkeypatch.setattr(app, "_print_written", lambda *_: signal.raise_signal(signal.SIGINT))

    status = main(["recipe=llama/llama3_tiny_pretrain", "action=run", "run.dir=run"])

    last = read_events(tmp_path / "run/events.jsonl")[-1]
    assert (status, last.event) == (130, "run_finished")
    assert last.fields == {"exit_status": 130, "reason": "stopped by SIGINT"}
    assert "stopped by SIGINT" in capsys.readouterr().out
