"""The report in a real browser that reaches no network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.report import write_report
from resilience.events import EventLog
from tests.launcher.local_job import local_job
from tests.launcher.run_events import whole_run

CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_draws_the_curves_without_network(tmp_path: Path) -> None:
    assert CHROMIUM
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.json").write_text(local_job("trainer.max_steps=4").to_json())
    for event in whole_run():
        with EventLog(
            run / "events.jsonl",
            node=event.node,
            rank=event.rank,
            generation=event.generation,
            clock=lambda now=event.time: now,
        ) as log:
            log.write(event.event, step=event.step, **event.fields)

    page = write_report(run)
    drawn = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip

    curves = re.findall(r'<path class="js-line"[^>]* d="M([^"]+)"', drawn)
    assert len(curves) >= 2, "the curves of loss and step time"
    assert all(curve.count("L") >= 1 or "," in curve for curve in curves)
    bars = re.findall(r'class="point"><path[^>]* d="M', drawn)
    assert len(bars) >= 16, "four ranks with at least four phases each"
