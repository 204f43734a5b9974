"""Programs of a user's under a real agent: right ones, and each kind of wrong one to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from resilience.node_config import AgentConfig, NodeConfig, ProgramConfig
from tests.resilience.agent.runs import Run

PYTHON = ("python",)


def start(
    run: Run,
    text: str,
    *words: str,
    node: str = "n0",
    num_nodes: int = 1,
    num_workers: int = 1,
    max_restarts: int = 0,
    interpreter: Sequence[str] = PYTHON,
    variables: Mapping[str, str] | None = None,
    **program: Any,
) -> None:
    """Start the agent of a node that runs a script of this text in the folder `code`."""
    code = run.folder / "code"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text(text)
    told = {"executed": False, "folder": str(code), "alone": False, "progress": ()}
    config = AgentConfig(
        nodes_min=num_nodes, nodes_max=num_nodes, workers_per_node=num_workers, shards=None,
        join_deadline_s=60.0, max_restarts=max_restarts, checkpointless=None,
        program=ProgramConfig(**{**told, "hang_deadline_s": None, **program}),
    )  # fmt: skip
    path = run.folder / "node.json"
    path.write_text(NodeConfig(agent=config, memoryd=None).to_json())
    run.start(
        node, "--no-recovery", "--config", str(path), "--term-deadline-s", "1",
        program=words or ("train.py",), interpreter=interpreter, warm="imports", preload=(),
        variables=variables,
    )  # fmt: skip


def said(run: Run, node: str = "n0") -> str:
    """Return the reason for which the run has ended."""
    (line,) = [each for each in run.text(node).splitlines() if "the run ends with" in each]
    return line.partition("exit status ")[2]


def out(run: Run, name: str) -> str:
    path = run.folder / "out" / name
    assert path.exists(), run.show()
    return path.read_text()


WRITE = "import os, sys, pathlib\nout = pathlib.Path(os.environ['OUT'])\n"


# ---- programs that are right

AS_BY_PYTHON = f"""{WRITE}
import atexit, multiprocessing, threading, time, beside
class Named:
    value = 3
def work(queue):
    queue.put((__name__, Named()))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    name, found = queue.get()
    child.join()
    assert type(found) is Named and name == "__mp_main__", (name, found)
    print(sys.argv, pathlib.Path.cwd().name, pathlib.Path(__file__).name, beside.value, end=" ")
    print(pathlib.Path(sys.path[0]).name, os.environ.get("OPENBLAS_NUM_THREADS"))
    atexit.register(lambda: print("at the end"))
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    open_file = open(out / "unclosed", "w")
    open_file.write("flushed")
    sys.exit("last words")
"""


def test_script_is_run_as_by_the_interpreter(run: Run) -> None:
    """What it sees, and all that follows its last line; compared with `python train.py`."""
    (run.folder / "code").mkdir()
    (run.folder / "code" / "beside.py").write_text("value = 7\n")
    start(run, AS_BY_PYTHON, "train.py", "--lr", "3e-4")

    assert run.wait() == 1, run.show()
    assert out(run, "unclosed") == "flushed"
    (run.folder / "out" / "unclosed").unlink()
    command = [sys.executable, "train.py", "--lr", "3e-4"]
    variables, code = {**os.environ, "OUT": str(run.folder / "out")}, run.folder / "code"
    plain = subprocess.run(
        command, cwd=code, env=variables, capture_output=True, text=True, check=False
    )
    ours = [line.removeprefix("[n0 rank 0] ") for line in run.text().splitlines()]
    assert (plain.returncode, plain.stderr) == (1, "last words\n")
    assert [line for line in ours if line in plain.stdout.splitlines()] == plain.stdout.splitlines()
    assert "rank 0 ended with exit status 1: last words" in said(run)
    run.assert_nothing_left()


EXECUTED = f"""{WRITE}
from resilience.inprocess.handles import read_handles
from resilience.comm.page import Page
handles = read_handles(os.environ)
Page(handles.page_file, handles.num_slots).read(handles.slot)
os.write(handles.events_file, b"")
os.fstat(handles.agent_file)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONUNBUFFERED")
(out / f"rank-{{os.environ['RANK']}}").write_text(
    " ".join([*sys.argv[1:], *(os.environ[name] for name in names), os.getcwd()])
)
print("step 1 loss 2.5\\rstep 2 loss 1.5")
"""


@pytest.mark.slow
def test_executed_program_has_its_rank_and_its_agents_files(run: Run) -> None:
    progress = (r"step (?P<step>\d+) loss (?P<loss>\S+)",)
    how = {"interpreter": (sys.executable,), "executed": True, "progress": progress}
    start(run, EXECUTED, "train.py", "word", num_workers=2, **how)

    assert run.wait() == 0, run.show()
    for rank in range(2):
        assert out(run, f"rank-{rank}") == f"word {rank} 2 {rank} 1 {run.folder / 'code'}"
    steps = [each for each in run.events() if each.event == "step"]
    assert [(each.step, each.fields["loss"]) for each in steps] == [(1, 2.5), (2, 1.5)]
    assert steps[0].rank in (0, 1)
    run.assert_nothing_left()


ALONE = """#!/bin/sh
[ -z "$RANK$WORLD_SIZE$MASTER_PORT$TORCHELASTIC_RUN_ID" ] || exit 9
[ "$1 $2 $3:$4" = "$NODE_RANK $NUM_NODES $HEAD_ADDR:$HEAD_PORT" ] || exit 8
echo "$3:$4" >"$OUT/head-$1"
exec "$PYTHON" train.py "$1" "$4"
"""
MEET = f"""{WRITE}
import socket, subprocess, time
subprocess.run([sys.executable, "-c", "import resilience; resilience.log(7, loss=0.5)"], check=True)
place, at = int(sys.argv[1]), ("127.0.0.1", int(sys.argv[2]))
if place == 0:
    socket.create_server(at).accept()[0].sendall(b"met")
while place:
    try:
        sys.exit((out / "met").write_bytes(socket.create_connection(at).recv(3)) != 3)
    except ConnectionRefusedError:
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_programs_that_are_alone_on_their_nodes_meet_at_the_head(run: Run) -> None:
    code = run.folder / "code"
    code.mkdir()
    (code / "launch.sh").write_text(ALONE)
    (code / "launch.sh").chmod(0o755)
    words = ("{node_rank}", "{num_nodes}", "{head_addr}", "{head_port}")
    how = {"interpreter": ("./launch.sh",), "executed": True, "alone": True, "num_nodes": 2}
    for node in ("n0", "n1"):
        start(run, MEET, *words, node=node, variables={"PYTHON": sys.executable}, **how)

    assert [run.wait(node) for node in ("n0", "n1")] == [0, 0], run.show()
    assert out(run, "met") == "met"
    assert out(run, "head-0") == out(run, "head-1")
    # By a process that has inherited nothing of its worker but variables; of rank 0 alone.
    steps = [each for each in run.events() if each.event == "step"]
    assert [(each.step, each.fields["loss"]) for each in steps] == [(7, 0.5)]
    run.assert_nothing_left()


# ---- programs that are wrong


@pytest.mark.parametrize(("words", "program", "message"), [
    (("other.py",), {}, "no script '{code}/other.py'; want a file, or"),
    (("-m", "nothing_here"), {}, "no module 'nothing_here'"),
    ((), {"folder": "/nowhere/at/all"}, "no folder '/nowhere/at/all' here"),
    ((), {"executed": True, "interpreter": ("no-such-program",)},
     "no program ['no-such-program'] on PATH or in {code}"),
    ((), {"progress": ("loss",)}, "agent.program.progress: 'loss' is none"),
])  # fmt: skip
def test_program_that_is_not_there_is_one_message(
    run: Run, words: Sequence[str], program: Mapping[str, Any], message: str
) -> None:
    start(run, "", *words, **program)

    assert run.wait() == 2, run.show()
    (line,) = run.text().splitlines()
    assert message.format(code=run.folder / "code") in line
    assert not (run.folder / "run").exists()


GRANDCHILD = """
import subprocess
command = ["sh", "-c", "sleep 600 >/dev/null 2>&1 & setsid sleep 600 >/dev/null 2>&1"]
subprocess.Popen(command, start_new_session=True)
"""
FLOOD = """
import os
line = b"x" * 99 + b"\\n"
for _ in range(1700):
    os.write(1, line * 600)
"""
KILLED = """
import os, signal
os.kill(os.getpid(), 0 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else signal.SIGKILL)
"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(0 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else 600)
"""
STEPS = """
import time
for number in range(6000):
    print("step 2" if number < 3 else "still here")
    time.sleep(0.1)
"""
NO_STEP = "no output and no processor time for 2 s; the program tells no steps"
QUICK = {"hang_deadline_s": 2.0}
SHOWN = {"progress": (r"step (?P<step>\d+)",)}
USED_UP = "the 1 restart that trainer.max_restarts allows is used up"


@pytest.mark.slow
@pytest.mark.parametrize(("text", "how", "status", "words"), [
    pytest.param("def", {}, 1, "SyntaxError: invalid syntax", id="syntax-error"),
    pytest.param("import gone", {}, 1, "No module named 'gone'", id="missing-import"),
    pytest.param("raise SystemExit(0)", {}, 0, "", id="exits-0-at-once"),
    pytest.param("input()", {}, 1, "EOFError: EOF when reading a line", id="waits-for-input"),
    pytest.param("import time\ntime.sleep(600)", QUICK, 1, NO_STEP, id="hangs"),
    pytest.param(STUBBORN, {**QUICK, "max_restarts": 1}, 0, "", id="ignores-SIGTERM"),
    pytest.param(STEPS, {**QUICK, **SHOWN}, 1, "no step for 2 s", id="hangs-after-steps"),
    pytest.param(GRANDCHILD, {}, 0, "", id="leaves-processes"),
    pytest.param(FLOOD, SHOWN, 0, "", id="prints-100-MB-a-second"),
    pytest.param(KILLED, {"max_restarts": 1}, 0, "", id="killed-and-started-again"),
    pytest.param(KILLED, {}, 137, "rank 0 was killed by SIGKILL", id="killed"),
    pytest.param("raise SystemExit(143)", {}, 1, "ended with exit status 143", id="exits-143"),
    pytest.param("import os\nos.kill(0, 15)", {}, 1, "was killed by SIGTERM", id="ends-itself"),
    pytest.param("import os\nos.abort()", {"max_restarts": 1}, 134, f"SIGABRT; {USED_UP}",
                 id="aborts-twice"),
])  # fmt: skip
def test_program_that_is_wrong_ends_as_it_is(
    run: Run, text: str, how: Mapping[str, Any], status: int, words: str
) -> None:
    start(run, text, **how)

    assert run.wait() == status, run.show()
    if status:
        assert words in said(run)
    run.assert_nothing_left()


def test_program_that_hangs_is_started_again_and_what_it_left_is_gone(run: Run) -> None:
    """A process in a session of its own is killed before the next start."""
    text = f"""{WRITE}
import subprocess, time
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if count:
    left = pathlib.Path("/proc", (out / "left").read_text())
    sys.exit(left.exists() and left.joinpath("cmdline").read_text() != "")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
(out / "left").write_text(str(child.pid))
time.sleep(600)
"""
    start(run, text, max_restarts=1, hang_deadline_s=1.0)

    assert run.wait() == 0, run.show()
    faults = [each.fields for each in run.events() if each.event == "fault_detected"]
    assert [(each["reason"], each["text"]) for each in faults] == [
        ("hung", NO_STEP.replace("2 s", "1 s"))
    ]
    run.assert_nothing_left()


@pytest.mark.slow
def test_agent_that_stood_still_does_not_take_its_program_for_hung(run: Run) -> None:
    text = f"""{WRITE}
import time
for number in range(80):
    time.sleep(0.1)
    print("alive", flush=True)
    (out / "alive").write_text(str(number))
"""
    start(run, text, hang_deadline_s=2.0)
    run.wait_for(lambda each: each.event == "generation_opened")
    agent = run.agents["n0"]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        agent.send_signal(number)
        subprocess.run(["sleep", "3"], check=True)

    assert run.wait() == 0, run.show()
    assert not [each for each in run.events() if each.event == "fault_detected"]
    run.assert_nothing_left()


@pytest.mark.slow
def test_worker_that_waits_for_its_rank_does_not_hang(run: Run) -> None:
    for node in ("n0", "n1"):
        start(run, "print('done')", node=node, num_nodes=2, hang_deadline_s=1.0)
        subprocess.run(["sleep", "3"], check=True)

    assert [run.wait(node) for node in ("n0", "n1")] == [0, 0], run.show()
    assert NO_STEP.replace("2 s", "1 s") not in run.text("n0") + run.text("n1")


# ---- the record


@pytest.mark.slow
def test_commit_of_the_programs_folder_is_in_the_record(run: Run) -> None:
    code = run.folder / "code"
    code.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(code)]
    (code / "train.py").write_text("")
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    start(run, "import time\ntime.sleep(1)\n")

    assert run.wait() == 0, run.show()
    (seen,) = [each.fields for each in run.events() if each.event == "code_seen"]
    assert dict(seen) == {"folder": str(code), "commit": commit, "is_dirty": True}
