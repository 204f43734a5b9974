"""The report in a real browser that reaches no network."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.report import write_report
from resilience.events import Event
from tests.launcher.report.test_account import write_run
from tests.launcher.run_events import tiered_run, whole_run

CHROMIUM = shutil.which("chromium")


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


def drawn(folder: Path, events: Sequence[Event]) -> str:
    """Return what a browser makes of a run's report."""
    assert CHROMIUM
    write_run(folder / "run", events)
    page = write_report(folder / "run")
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=10000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip


def test_a_browser_draws_the_curves_without_network(tmp_path: Path) -> None:
    found = drawn(tmp_path, whole_run())

    curves = re.findall(r'<path class="js-line"[^>]* d="M([^"]+)"', found)
    assert len(curves) >= 2, "the curves of loss and step time"
    assert all(curve.count("L") >= 1 or "," in curve for curve in curves)
    bars = re.findall(r'class="point"><path[^>]* d="M', found)
    assert len(bars) >= 16, "four ranks with at least four phases each"


@pytest.mark.slow
def test_a_browser_draws_the_checkpoints_above_the_ranks(tmp_path: Path) -> None:
    found = drawn(tmp_path, tiered_run())

    timeline = found[found.index('<div id="timeline"') :]
    assert len(re.findall(r'<path class="point"', timeline)) == 4, "two taken, a failed, a loaded"
    assert re.search(r">checkpoints\s*<", timeline)
