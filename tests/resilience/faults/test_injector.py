from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.events import EventLog, read_events
from resilience.faults.injector import InjectedFault, Injector
from resilience.settings import Fault
from resilience.state.layout import make_layout

pytestmark = pytest.mark.timeout(60)
FAULT = {"kind": "exception", "place": "forward", "step": 2, "rank": 0}


def _injector(folder: Path, *faults, rank=0, **options) -> Injector:
    options = {"on_corrupt": lambda _: None, **options}
    return Injector(
        [Fault(**{**FAULT, **each}) for each in faults],
        rank=rank,
        layout=make_layout(nodes=("n0", "n1"), num_local_ranks=2),
        run_dir=folder,
        **options,
    )


@contextmanager
def _forked(program: Callable[[], object]) -> Iterator[int]:
    """Run a program in a child, which ends with status 0 where the program returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            program()
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _wait(child: int) -> int:
    """Return how a child ended or stopped, and leave it to be collected."""
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        pytest.param({"kind": "exception"}, 1, id="exception"),
        pytest.param({"kind": "sigkill"}, -signal.SIGKILL, id="sigkill"),
        pytest.param({"kind": "sigstop"}, -signal.SIGSTOP, id="sigstop"),
        pytest.param({"kind": "exit"}, 13, id="exit"),
        pytest.param({"kind": "corrupt", "tensor": "moment"}, 0, id="corrupt"),
        pytest.param({"kind": "slow", "seconds": 1e-9}, 0, id="slow"),
    ],
)
def test_fault_fires_once_over_processes(tmp_path, fault, status):
    def program():
        _injector(tmp_path, fault).reach("forward", 2)

    with _forked(program) as first:
        assert _wait(first) == status
    with _forked(program) as replacement:
        assert _wait(replacement) == 0
    assert (tmp_path / "faults" / "0").exists()


def test_fault_fires_once_in_a_process(tmp_path):
    injector = _injector(tmp_path, {})

    with pytest.raises(InjectedFault, match=r"^injected in forward of step 2 on rank 0$"):
        injector.reach("forward", 2)
    injector.reach("forward", 2)

    assert not injector.places


@pytest.mark.parametrize(
    ("place", "step", "rank"),
    [
        pytest.param("backward", 2, 0, id="place"),
        pytest.param("forward", 1, 0, id="earlier"),
        pytest.param("forward", 3, 0, id="later"),
        pytest.param("forward", 2, 1, id="rank"),
    ],
)
def test_nothing_fires_elsewhere(tmp_path, place, step, rank):
    _injector(tmp_path, {}, rank=rank).reach(place, step)

    assert list(tmp_path.iterdir()) == []


def test_faults_of_one_place_fire_one_after_the_other(tmp_path):
    """As the step is run again after the first."""
    corrupted = []
    corrupt = {"kind": "corrupt", "tensor": "parameter"}
    injector = _injector(tmp_path, {}, {}, corrupt, on_corrupt=corrupted.append)

    for _ in range(2):
        with pytest.raises(InjectedFault):
            injector.reach("forward", 2)
    injector.reach("forward", 2)

    assert corrupted == ["parameter"]


@pytest.mark.parametrize(("step", "fires"), [(1, False), (2, True), (9, True)])
def test_fault_in_recovery_waits_for_the_first_one_from_its_step_on(tmp_path, step, fires):
    slept, slow = [], {"place": "recovery", "kind": "slow", "seconds": 2.5}
    injector = _injector(tmp_path, slow, sleep=slept.append)

    injector.reach("recovery", step)

    assert slept == [2.5] * fires
    assert bool(injector.places) != fires


def test_event_is_written_before_the_fault_acts(tmp_path):
    path = tmp_path / "events.jsonl"

    def program():
        with EventLog(path, node="node-0", rank=0, generation=3) as events:
            _injector(tmp_path, {"kind": "sigkill"}, events=events).reach("forward", 2)

    with _forked(program) as child:
        _wait(child)

    (event,) = read_events(path)
    assert (event.event, event.step, event.generation) == ("fault_injected", 2, 3)
    assert event.fields == {"fault_kind": "sigkill", "place": "forward"}


@pytest.mark.parametrize(
    ("rank", "fires"),
    [
        pytest.param(2, True, id="first-of-the-node"),
        pytest.param(3, False, id="second-of-the-node"),
        pytest.param(0, False, id="another-node"),
    ],
)
def test_fault_of_a_node_fires_on_its_first_worker(tmp_path, rank, fires):
    injector = _injector(tmp_path, {"rank": None, "node": 1}, rank=rank)

    assert injector.places == ({"forward"} if fires else set())


def test_sigkill_of_a_node_takes_its_workers_and_agent_and_no_others(tmp_path):
    kill = {"kind": "sigkill", "rank": None, "node": 0}
    reader, writer = os.pipe()

    def stay(rank):
        _injector(tmp_path, kill, rank=rank)
        os.write(writer, b"x")
        signal.pause()

    with (
        _forked(signal.pause) as agent,
        _forked(lambda: stay(1)) as sibling,
        _forked(lambda: stay(2)) as stranger,
    ):
        assert [os.read(reader, 1) for _ in range(2)] == [b"x", b"x"]

        def fire():
            injector = _injector(tmp_path, kill, agent_pid=agent)
            injector.reach("forward", 2)

        with _forked(fire) as first:
            assert [_wait(each) for each in (first, sibling, agent)] == [-signal.SIGKILL] * 3
        assert os.waitid(os.P_PID, stranger, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    os.close(reader)
    os.close(writer)


def test_process_that_got_the_number_of_a_dead_worker_is_spared(tmp_path):
    kill = {"kind": "sigkill", "rank": None, "node": 0}
    folder = tmp_path / "faults" / "node-0"

    with _forked(signal.pause) as stranger:

        def fire():
            injector = _injector(tmp_path, kill)
            (folder / "1").write_text(f"{stranger} 1")
            (folder / "2").write_text(f"{2**22 + 1} 1")
            injector.reach("forward", 2)

        with _forked(fire) as first:
            assert _wait(first) == -signal.SIGKILL
        assert os.waitid(os.P_PID, stranger, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
