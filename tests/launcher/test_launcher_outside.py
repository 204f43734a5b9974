"""What fails around the launcher: status 1 and the system's own words, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.command import launch
from tests.launcher.local_job import run_scripts

TINY = "llama/llama3_tiny_pretrain"
LAUNCHER = f"exec {sys.executable} -m launcher"


def _shell(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("arguments", ["list", f"show {TINY}", f"recipe={TINY}"])
def test_a_folder_that_is_gone_is_said(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "gone").mkdir()

    done = _shell(f"cd gone && rmdir ../gone && {LAUNCHER} {arguments}", tmp_path)

    said = "the current folder is gone; change to one that is there\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("arguments", ["schema", f"show {TINY}", f"recipe={TINY}", "--help"])
def test_a_full_disk_below_the_output_is_said(tmp_path: Path, arguments: str) -> None:
    done = _shell(f"{LAUNCHER} {arguments} >/dev/full", tmp_path)

    assert (done.returncode, done.stderr) == (1, "output: No space left on device\n")


@pytest.mark.parametrize("arguments", ["list tiny", f"recipe={TINY}"])
def test_a_closed_output_is_no_reason_to_fail(tmp_path: Path, arguments: str) -> None:
    done = _shell(f"{LAUNCHER} {arguments} >&-", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("arguments", "reader", "read"), [
    (f"recipe={TINY} --info all", "head -1", "Hydra "), ("schema", "true", ""),
])  # fmt: skip
def test_a_reader_may_leave(tmp_path: Path, arguments: str, reader: str, read: str) -> None:
    done = _shell(f"({LAUNCHER} {arguments}) | {reader}", tmp_path)
    assert done.stdout.startswith(read)
    assert "Traceback" not in done.stderr
    assert "Logging error" not in done.stderr


def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir(mode=0)
    # Root may read everything but for these two rights.
    without = "setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-dac_override"
    prefix = f"exec {without}" if os.getuid() == 0 else "exec"

    done = _shell(LAUNCHER.replace("exec", prefix, 1) + f" recipe={TINY}", tmp_path)

    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}/recipes/{TINY}.yaml: Permission denied\n"


def test_a_run_whose_folder_is_removed_is_no_success(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    status, shown = run_scripts(folder, f'rm -rf "{folder}"')

    assert status == 1
    assert f"the run's folder {folder} was removed, renamed or replaced while it ran" in " ".join(
        shown.split()
    )


def test_text_that_an_output_cannot_write_is_written_otherwise(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"# @package _global_\ndefaults: [{TINY}, _self_]\nrecipe: {{description: Gr\xf6\xdfe}}\n",
        encoding="utf-8",
    )

    ended = launch("show", "mine.yaml", folder=tmp_path, env={"PYTHONIOENCODING": "ascii"})

    assert ended.status == 0, ended.err
    assert "description: Gr\\xf6\\xdfe" in ended.out
