"""How runs of one node end: the exit status, the last words, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.agent.coordination.counters import UNTOLD
from tests.cases import slow
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import ROOT, Run, fault, plan
from tests.tokens import write_token

RANKS = ("--nproc-per-node", "2")


def test_block_that_fails_again_and_again_ends_the_run(run: Run) -> None:
    """The first traceback comes first, then the reason; the status asks for another start."""
    faults = plan(fault("raise", "forward", 1, 2, always=True))
    run.start("n0", *RANKS, "--restarts-without-progress-max", "2", variables=faults)

    assert run.wait() == 75, run.show()
    text = run.text()
    assert "Traceback" in text
    assert text.index("first failure: rank 1, generation 0") < text.index("ValueError: a planned")
    assert text.splitlines()[-1] == (
        "resilience.agent n0: the run ends with exit status 75: 3 faults without a committed step "
        "between them, allowed are 2 (restarts_without_progress_max); mend what comes back at "
        f"once; the last fault: rank 1: ValueError: a planned fault{UNTOLD}"
    )
    assert [each.event for each in run.events()][-1] == "gave_up"
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("fatal", 1, "rank 1: FatalError: cannot be mended"),
        slow("exit", 3, "some ranks were stopped"),
    ],
)
def test_end_of_one_rank_ends_the_run(run: Run, kind: str, status: int, words: str) -> None:
    run.start("n0", *RANKS, variables=plan(fault(kind, "forward", 1, 2)))

    assert run.wait() == status, run.show()
    assert words in run.text()
    assert [each.event for each in run.events()].count("generation_opened") == 1
    run.assert_nothing_left()


def test_block_that_ends_well_on_some_ranks_leaves_the_others_waiting_until_they_hang(
    run: Run, undisturbed: Undisturbed
) -> None:
    """Then all run it again: here the rank that had ended has more to do this time."""
    early = plan(fault("end_early", "forward", 0, 2))
    run.start("n0", *RANKS, "--hang-deadline-s", "2", variables=early)

    assert run.wait() == 0, run.show()
    first, *others = [each for each in run.events() if each.event == "fault_detected"]
    assert (first.rank, first.fields["reason"]) == (1, "hung")
    assert first.fields["quiet_s"] >= 2, "the run stood still for the whole deadline"
    # A rank that waits may tell of connections that end with the generation.
    assert {each.fields["reason"] for each in others} <= {"group"}
    assert [each.event for each in run.events()].count("generation_opened") == 2
    run.assert_same(undisturbed(2, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [("exit", 3, "ended with exit status 3"), ("kill", 1, "was killed by SIGKILL")],
)
def test_failure_after_the_end_is_the_runs(run: Run, kind: str, status: int, text: str) -> None:
    """Where the program may have more to do than its block."""
    run.start("n0", *RANKS, variables=plan(fault(kind, "after_end", 1)))

    assert run.wait() == status, run.show()
    assert f"rank 1 {text} after its last step" in run.text()
    run.assert_nothing_left()


def test_run_that_has_finished_stays_so_whatever_dies_then(
    run: Run, undisturbed: Undisturbed
) -> None:
    run.start("n0", *RANKS, variables=plan(fault("kill", "after_end", 1), IS_ALL=1))

    assert run.wait() == 0, run.show()
    assert run.happened() == [0]
    assert "rank 1 was killed by SIGKILL after its last step; the run had fin" in run.text()
    run.assert_same(undisturbed(2, 6))


@pytest.mark.parametrize(
    ("number", "variables", "options", "words"),
    [
        pytest.param(signal.SIGTERM, {"ORDERLY": 1}, (), "all ranks have ended", id="orderly"),
        slow(signal.SIGTERM, {}, (), "asked to end", id="killed-by-it"),
        slow(signal.SIGINT, {}, (), "exit status 130", id="ctrl-c"),
        slow(
            signal.SIGTERM,
            {"STUBBORN": 1},
            ("--term-deadline-s", "600", "--grace-s", "1"),
            "workers did not stop in the grace period",
            id="ignores-it",
        ),
    ],
)
def test_signal_ends_the_run(
    run: Run,
    number: signal.Signals,
    variables: dict[str, object],
    options: tuple[str, ...],
    words: str,
) -> None:
    """Nobody is replaced; a program that ignores it is ended after its time."""
    told = plan(fault("tell", "gate", 0, 3), NOTE=run.note, STEPS=1_000_000, **variables)
    agent = run.start("n0", *RANKS, *options, variables=told)
    run.wait_for_note()

    agent.send_signal(number)

    assert run.wait() == 128 + number, run.show()
    assert words in run.text()
    assert "Traceback" not in run.text()
    events = [each.event for each in run.events()]
    assert "worker_replaced" not in events
    assert "generation_broken" not in events
    run.assert_nothing_left()


def test_ctrl_c_ends_an_agent_that_waits_for_others_without_a_traceback(run: Run) -> None:
    agent = run.start("n0", *RANKS, "--nnodes", "2", variables=plan())
    run.wait_for(lambda event: event.event == "node_joined")

    agent.send_signal(signal.SIGINT)

    assert run.wait() == 130, run.show()
    assert "Traceback" not in run.text()
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("kind", "has_zygote"),
    [("stop", False), pytest.param("gil", True, marks=pytest.mark.slow)],
)
def test_workers_end_with_their_agent(run: Run, kind: str, has_zygote: bool) -> None:
    """Also one that is stopped and whose zygote is gone, or holds the interpreter's lock."""
    faults = plan(fault("tell", "forward", 1, 2), fault(kind, "forward", 1, 2), NOTE=run.note)
    agent = run.start("n0", *RANKS, variables=faults)
    run.wait_for_note()
    if not has_zygote:
        os.kill(run.zygote(), signal.SIGKILL)

    agent.kill()

    agent.wait()
    run.assert_nothing_left()


def test_workers_live_on_without_their_zygote(run: Run, undisturbed: Undisturbed) -> None:
    """And the next one forks who takes the place of a worker that dies later."""
    faults = plan(fault("kill_zygote", "forward", 0, 1), fault("kill", "forward", 1, 3))
    run.start("n0", *RANKS, "--spares", "0", variables=faults)

    assert run.wait() == 0, run.show()
    assert run.happened() == [0, 1]
    assert "was killed by SIGKILL; another one is started, and the workers live" in run.text()
    events = [each.event for each in run.events()]
    assert (events.count("worker_replaced"), events.count("generation_opened")) == (1, 2)
    assert [role for number, rank, role, _ in run.resumed() if (number, rank) == (1, 0)] == ["kept"]
    run.assert_same(undisturbed(2, 6))


@pytest.mark.slow
def test_agent_gives_up_where_three_zygotes_in_a_row_die_before_they_are_ready(
    run: Run, tmp_path: Path
) -> None:
    """The second and the third are real processes, which import all anew."""
    (tmp_path / "deadly.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    run.start("n0", *RANKS, "--preload", "deadly", variables={"PYTHONPATH": path})

    assert run.wait() == 75, run.show()
    assert run.text().splitlines()[-1] == (
        "resilience.agent: the process that forks workers was killed by SIGKILL, 3 times before it "
        "was ready"
    )
    assert run.text().count("another one is started") == 2
    run.assert_nothing_left()


def test_modules_that_start_threads_are_imported_by_each_worker(
    run: Run, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Which modules a library imports is up to what else is installed; the run has to train."""
    path = f"{ROOT}{os.pathsep}{make_module_with_thread(tmp_path, 'a_pool')}"
    faults = plan(fault("kill", "forward", 1, 3))
    words = ("--preload", "torch", "--preload", "with_thread")
    run.start("n0", *RANKS, *words, variables={"PYTHONPATH": path, **faults}, is_real=True)

    assert run.wait() == 0, run.show()
    assert run.text().count("beside the threads (a_pool) that the modules of --preload start") == 1
    run.assert_same(undisturbed(2, 6))


def test_thread_that_is_ready_for_forks_is_no_hindrance(tmp_path: Path) -> None:
    """pyarrow's allocator has one, and transformers imports what imports pyarrow."""
    code = "from resilience.agent.processes import zygote; print(zygote._find_threads())"
    shown = []
    for name in ("jemalloc_bg_thd", "another"):
        path = f"{ROOT}{os.pathsep}{make_module_with_thread(tmp_path, name)}"
        ended = subprocess.run(
            [sys.executable, "-c", f"import with_thread; {code}"],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        shown.append(ended.stdout.strip())

    assert shown == ["[]", "['another']"]


def make_module_with_thread(folder: Path, name: str) -> Path:
    """Write a module `with_thread` whose import starts a thread of that name."""
    lines = [
        "import ctypes, threading",
        "named = threading.Event()",
        "def rest():",
        f"    ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)",
        "    named.set()",
        "    threading.Event().wait()",
        "threading.Thread(target=rest, daemon=True).start()",
        "named.wait()",
    ]
    (folder / "with_thread.py").write_text("\n".join(lines) + "\n")
    return folder


def test_log_folder_that_fails_later_does_no_harm(run: Run, undisturbed: Undisturbed) -> None:
    """The run goes on and says so once. Its agent is a real process, which imports all anew."""
    faults = plan(
        fault("break_logs", "forward", 0, 1),
        fault("raise", "forward", 1, 2),
        fault("kill", "forward", 1, 3),
    )
    run.start("n0", *RANKS, variables=faults, is_real=True)

    assert run.wait() == 0, run.show()
    assert run.text().count("no more logs in") == 1
    run.assert_same(undisturbed(2, 6))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(
            ("--transfer-buffer-mib", "100000000"),
            "no memory for resilience.checkpointless.transfer_buffer_mib 100000000 x 2 workers",
            id="buffer",
        ),
        pytest.param(("--run-dir", "n0.txt"), "cannot write to --run-dir n0.txt", id="run-dir"),
        pytest.param(
            ("--local-addr", "203.0.113.1", "--token-file", "token"),
            "cannot listen on '203.0.113.1'",
            id="address",
        ),
        pytest.param(
            ("--preload", "json.no_such_module"),
            "cannot import 'json.no_such_module' of --preload",
            id="preload",
        ),
    ],
)
def test_agent_that_cannot_start_says_why_in_a_line(
    run: Run, options: tuple[str, ...], words: str
) -> None:
    write_token(run.folder / "token")
    run.start("n0", *RANKS, *options)

    assert run.wait() == 1, run.show()
    (line,) = [each for each in run.text().splitlines() if each.startswith("resilience.agent")]
    assert words in line
    assert "Traceback" not in run.text()
    run.assert_nothing_left()


# ---- programs that do not start


def test_worker_that_dies_before_its_block_is_started_again(
    run: Run, undisturbed: Undisturbed
) -> None:
    faults = plan(fault("kill", "import", -1), fault("exit", "import", -1))
    run.start("n0", *RANKS, "--spares", "0", variables=faults)

    assert run.wait() == 0, run.show()
    assert run.happened() == [0, 1]
    run.assert_same(undisturbed(2, 6))


@pytest.mark.parametrize("warm", ["imports", slow("program")])
def test_program_that_can_never_start_ends_the_run_in_its_own_words(run: Run, warm: str) -> None:
    run.start("n0", *RANKS, program=("-m", "json.nosuchmod"), warm=warm)

    assert run.wait() == 1, run.show()
    # What another rank has printed may be read after it.
    said = "resilience.agent n0: the run ends with exit status 1: "
    (verdict,) = [line for line in run.text().splitlines() if line.startswith(said)]
    assert "ImportError: No module named json.nosuchmod" in verdict
    run.assert_nothing_left()
