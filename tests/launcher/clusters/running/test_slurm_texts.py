"""What a real Slurm has printed, and what is read from it. The texts are those of Slurm 22.05."""

from __future__ import annotations

import pytest

from launcher.clusters.running.slurm import read_account, read_job
from launcher.errors import OutsideError
from launcher.monitor.standing import JobStatus, Phase

BEFORE = "JobId=2 JobName=going UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 "
BEFORE += "Nice=0 Account=(null) QOS=(null) "
BETWEEN = " Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
BEHIND = " Partition=main AllocNode:Sid=localhost:21969 ReqNodeList=(null) ExcNodeList=(null) "


def line(
    state: str, code: str = "0:0", nodes: str = "", behind: str = "", ran: str = "00:00:02"
) -> str:
    return (
        f"{BEFORE}{state}{BETWEEN}ExitCode={code} RunTime={ran} TimeLimit=00:10:00{BEHIND}"
        f"NodeList={nodes} BatchHost=n1 NumNodes=2 Licenses=(null) Command=/tmp/s "
        f"WorkDir=/tmp{behind} Power= \n"
    )


@pytest.mark.parametrize(
    ("text", "phase", "why", "place"),
    [
        pytest.param(line("JobState=PENDING Reason=JobHeldUser"), Phase.QUEUED, "JobHeldUser", "",
                     id="held"),
        pytest.param(line("JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:n[1-4]"),
                     Phase.QUEUED, "ReqNodeNotAvail,_UnavailableNodes:n[1-4]", "", id="no-nodes"),
        pytest.param(line("JobState=RUNNING Reason=None", nodes="n[1-2]"), Phase.RUNNING, "",
                     "n[1-2]", id="running"),
        pytest.param(line("JobState=COMPLETING Reason=None", nodes="n[1-2]"), Phase.RUNNING,
                     "Slurm's state is COMPLETING", "n[1-2]", id="completing"),
        pytest.param(line("JobState=COMPLETED Reason=None", nodes="n[1-2]"), Phase.SUCCEEDED, "",
                     "n[1-2]", id="completed"),
        pytest.param(line("JobState=CANCELLED Reason=None", "0:15", "n[1-2]"), Phase.CANCELLED, "",
                     "n[1-2]", id="cancelled"),
        pytest.param(line("JobState=CANCELLED Reason=JobHeldUser"), Phase.CANCELLED, "", "",
                     id="cancelled-in-the-queue"),
        pytest.param(line("JobState=FAILED Reason=NonZeroExitCode", "7:0", "n1"), Phase.FAILED,
                     "Slurm's state is FAILED, exit status 7, NonZeroExitCode", "n1", id="failed"),
        pytest.param(line("JobState=FAILED Reason=NonZeroExitCode", "143:0", "n1"),
                     Phase.CANCELLED, "its processes got SIGTERM", "n1", id="asked-to-end"),
        pytest.param(line("JobState=FAILED Reason=NonZeroExitCode", "143:0", "n1", ran="00:07:01"),
                     Phase.FAILED, "its time limit of 00:10:00 ended it", "n1",
                     id="asked-to-end-by-the-time-limit"),
        pytest.param(line("JobState=FAILED Reason=NonZeroExitCode", "143:0", "n1", ran="00:06:59"),
                     Phase.CANCELLED, "its processes got SIGTERM", "n1",
                     id="asked-to-end-before-the-limit-is-near"),
        pytest.param(line("JobState=FAILED Reason=NonZeroExitCode", "7:0", "n1", ran="00:10:00"),
                     Phase.FAILED, "Slurm's state is FAILED, exit status 7, NonZeroExitCode", "n1",
                     id="failed-near-the-limit"),
        pytest.param(line("JobState=FAILED Reason=NonZeroExitCode", "143:0", "n1",
                          " PreemptTime=2026-11-28T08:15:18"), Phase.FAILED,
                     "Slurm preempted it at 2026-11-28T08:15:18, and does not queue it again", "n1",
                     id="preempted-and-ended-in-time"),
        pytest.param(line("JobState=PREEMPTED Reason=None", "0:0", "n1",
                          " PreemptTime=2026-11-28T08:15:18"), Phase.FAILED,
                     "Slurm preempted it at 2026-11-28T08:15:18, and does not queue it again", "n1",
                     id="preempted"),
        pytest.param(line("JobState=TIMEOUT Reason=TimeLimit", "0:15", "n1"), Phase.FAILED,
                     "Slurm's state is TIMEOUT, signal 15, TimeLimit", "n1", id="time-limit"),
        pytest.param(line("JobState=RUNNING Reason=None", behind=" Comment=JobState=FAILED"),
                     Phase.RUNNING, "", "", id="comment-of-a-person"),
    ],
)  # fmt: skip
def test_what_the_controller_says(text: str, phase: Phase, why: str, place: str) -> None:
    said = read_job(text, "going", warned_s=120)

    assert said == JobStatus(phase=phase, why=why, place=place)


def test_job_of_another_name_is_another_job() -> None:
    """Numbers begin anew where a controller loses its state."""
    said = read_job(line("JobState=RUNNING Reason=None"), "ours")

    assert said.phase is Phase.FORGOTTEN
    assert "'going'" in said.why


def test_what_is_no_job_is_said() -> None:
    with pytest.raises(OutsideError, match="scontrol printed no job but 'nonsense'"):
        read_job("nonsense\n", "going")


@pytest.mark.parametrize(
    ("text", "phase", "why"),
    [
        ("going|COMPLETED|0:0|n[1-2]|00:00:02|01:00:00\n", Phase.SUCCEEDED, ""),
        ("going|CANCELLED by 1000|0:0|n1|00:00:02|01:00:00\n", Phase.CANCELLED,
         "cancelled by user 1000"),
        ("going|REQUEUED|0:0|n1|00:00:02|01:00:00\ngoing|FAILED|7:0|n1|00:00:02|UNLIMITED\n",
         Phase.FAILED, "Slurm's state is FAILED, exit status 7"),
        ("going|FAILED|143:0|n1|00:00:02|01:00:00\n", Phase.CANCELLED, "its processes got SIGTERM"),
        ("going|FAILED|143:0|n1|1-23:57:00|2-00:00:00\n", Phase.FAILED,
         "its time limit of 2-00:00:00 ended it"),
        ("other|COMPLETED|0:0|n1|00:00:02|01:00:00\n", Phase.FORGOTTEN,
         "Slurm has given the job's number to another, 'other'"),
        ("", Phase.FORGOTTEN, "Slurm's accounting has no such job"),
    ],
)  # fmt: skip
def test_what_the_accounting_says(text: str, phase: Phase, why: str) -> None:
    said = read_account(text, "going", warned_s=120)

    assert (said.phase, said.why) == (phase, why)
