"""What is read of a node in Slurm's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.agent.slurm_node import main, read_word

# As Slurm 22.05 writes it.
TEXT = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1 
   CPUAlloc=0 CPUTot=192 CPULoad=0.31
   OS=Linux 5.15.0 #1 SMP Mon Jan 1 00:00:00 UTC 2026 
   RealMemory=2097152 AllocMem=0 FreeMem=9000 Sockets=192 Boards=1
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=main 
   BootTime={booted} SlurmdStartTime=2026-11-23T08:00:00
   LastBusyTime=2026-11-23T08:00:00
   Reason=State=POWERED_DOWN BootTime=2030-01-01T00:00:00 [root@2026-11-23T08:00:00]

"""  # noqa: W291
BOOTED = "booted 1795334399"


def text(state: str, booted: str = "2026-11-22T07:59:59") -> str:
    return TEXT.format(state=state, booted=booted)


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("IDLE", BOOTED),
        ("ALLOCATED", BOOTED),
        ("MIXED+DRAIN", BOOTED),
        ("DOWN", BOOTED),
        ("IDLE+CLOUD+POWERED_DOWN", "off"),
        ("DOWN*+POWERED_DOWN", "off"),
        ("DOWN*", ""),
        ("IDLE*", ""),
        ("ALLOCATED+CLOUD+NOT_RESPONDING", ""),
        ("IDLE+CLOUD+POWERING_DOWN", ""),
        ("ALLOCATED+POWER_DOWN", ""),
        ("IDLE+CLOUD+POWERED_DOWN+POWERING_UP", ""),
        ("idle", ""),
        ("POWERED_DOWN,IDLE", ""),
    ],
)
def test_state_of_a_node(state: str, word: str) -> None:
    assert read_word(text(state), "n1") == word


@pytest.mark.parametrize(
    "words",
    [
        "",
        "Node n1 not found",
        text("IDLE", "None"),
        text("IDLE", "Nov"),
        text("IDLE", "2026-11-22T07:59:59Z"),
        text("IDLE+POWERED_DOWN").replace("NodeName=n1", "NodeName=n12"),
        text("IDLE+POWERED_DOWN") * 2,
        text("IDLE+POWERED_DOWN").replace("Reason=", ""),
    ],
    ids=["nothing", "unknown", "never-booted", "short", "zone", "other", "two", "reason"],
)
def test_anything_else_is_no_word(words: str) -> None:
    assert read_word(words, "n1") == ""


def test_what_scontrol_complains_of_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho slurm_load_node: Unable to contact >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    assert main(["n1"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "exit status 1" in said.err
    assert said.err.endswith("slurm_load_node: Unable to contact\n")


def test_where_there_is_no_slurm_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main(["n1"]) == 1
    assert "No such file or directory: 'scontrol'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: NODE"),
        (["n1", "n2"], "unrecognized arguments: n2"),
        (["-n1"], "required: NODE"),
        ([""], "argument NODE: '' is no node of Slurm's"),
        (["n1;reboot"], "argument NODE: 'n1;reboot' is no node of Slurm's"),
    ],
)
def test_no_node(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert message in line
