"""A real Slurm of several nodes on one machine, for as long as somebody holds its input.

    python cluster.py FOLDER

prints `ready` once every node is in service and stops everything at the end of
its standard input, so that nothing stays behind however its user ended. The
daemons are its children and it is their subreaper: whatever they leave is its
child too. Keys, sockets, configuration, state and logs lie in FOLDER, which goes
at the end; only a failed start leaves it.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.ports import free_ports
from tests.processes import descendants

NUM_NODES = 4
"""Nodes that run jobs."""
NUM_CLOUD_NODES = 16
"""Nodes that a scheduler counts on and nobody starts: enough for the largest recipe."""
NUM_GPUS = 8
JOBS_MAX = 1000
"""Of one cluster. Others run on the same machine at the same time."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PATH_LENGTH_MAX = 80
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_SET_CHILD_SUBREAPER = 36
# Variables that are options of Slurm's commands.
_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SINFO_")

# config_overrides: a node may claim more CPUs and memory than this machine has.
# cred_expire: a requeued job may not start before its old credential has expired.
_CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=256
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PriorityType=priority/basic
JobRequeue=1
SlurmdParameters=config_overrides
ReturnToService=1
SlurmdTimeout=30
MessageTimeout=10
KillWait=10
UnkillableStepTimeout=10
CompleteWait=0
WaitTime=0
MinJobAge=600
FirstJobId={first_job_id}
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
SuspendExcNodes=n[1-{num_nodes}]
{nodes}
NodeName=c[1-{num_cloud_nodes}] {size} State=CLOUD
PartitionName=main Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE DefaultTime=60 State=UP
PartitionName=large Nodes=c[1-{num_cloud_nodes}] MaxTime=INFINITE DefaultTime=60 State=UP
"""


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which Slurm's commands reach this cluster and no other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
    return kept | {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}


def missing_program() -> str | None:
    """Return the first program that this needs and does not find."""
    return next((name for name in PROGRAMS if shutil.which(name, path=PATH) is None), None)


def write_configuration(folder: Path) -> None:
    """Write everything the daemons read."""
    for name in ("state", "spool", "log", "dev"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    # Slurm wants a character device for each GPU and takes its index from the name.
    for index in range(NUM_GPUS):
        (folder / "dev" / f"gpu{index}").symlink_to("/dev/null")
    (folder / "cgroup.conf").write_text("ConstrainDevices=no\n")
    devices = f"Name=gpu File={folder}/dev/gpu[0-{NUM_GPUS - 1}]"
    (folder / "gres.conf").write_text(
        f"NodeName=n[1-{NUM_NODES}] {devices}\nNodeName=c[1-{NUM_CLOUD_NODES}] {devices}\n"
    )
    ports = free_ports(NUM_NODES + 1)
    size = f"CPUs=192 RealMemory=2097152 Gres=gpu:{NUM_GPUS}"
    host = socket.gethostname().partition(".")[0]
    nodes = (
        f"NodeName=n{index} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[index]} {size}"
        for index in range(1, NUM_NODES + 1)
    )
    text = _CONFIG.format(
        folder=folder,
        user=getpass.getuser(),
        ports=ports,
        first_job_id=_first_job_id(),
        num_nodes=NUM_NODES,
        num_cloud_nodes=NUM_CLOUD_NODES,
        size=size,
        nodes="\n".join(nodes),
    )
    (folder / "slurm.conf").write_text(text)


def _first_job_id() -> int:
    """Return a number of this test process's own: jobs listen at ports that are made of theirs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return 1 + JOBS_MAX * int(worker)


def start(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start every daemon as a child in a session of its own; return once all answer."""
    daemons = [
        _daemon(
            folder,
            [
                "munged",
                "--foreground",
                "--force",
                "--num-threads=2",
                f"--key-file={folder}/munge.key",
                f"--socket={folder}/munge.sock",
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/log/munged.log",
                f"--seed-file={folder}/munged.seed",
            ],
        )
    ]
    wait_until((folder / "munge.sock").exists, "munged listens", _START_TIMEOUT_S)
    daemons.append(_daemon(folder, ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"]))
    daemons += [
        _daemon(folder, ["slurmd", "-D", "-N", f"n{index}", "-f", f"{folder}/slurm.conf"])
        for index in range(1, NUM_NODES + 1)
    ]
    wait_until(lambda: _in_service(folder), "every node is in service", _START_TIMEOUT_S)
    return daemons


def _daemon(folder: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with (folder / "log" / "start.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(folder),
            start_new_session=True,
        )


def _in_service(folder: Path) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"],
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    states = [line.split()[1] for line in done.stdout.splitlines()]
    return states == ["idle"] * NUM_NODES


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Ask until it is so; raises TimeoutError that says what never came."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.05)


def stop(folder: Path) -> None:
    """End jobs and daemons, politely first, and then whatever is left of them."""
    if (folder / "slurm.conf").exists():
        subprocess.run(
            ["scancel", "--quiet", f"--user={getpass.getuser()}"],
            env=environment(folder),
            timeout=_STOP_TIMEOUT_S,
            capture_output=True,
        )
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, sent)
        try:
            wait_until(_has_no_child, "every process has ended", _STOP_TIMEOUT_S)
        except TimeoutError:
            continue
        return


def _has_no_child() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def main() -> None:
    """Run a cluster until the standard input ends."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        write_configuration(folder)
        start(folder)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        stop(folder)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
