"""A node that somebody asks to leave its run, from elsewhere."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from resilience.agent.connections.tcp_transport import TcpTransport
from resilience.agent.coordination.founding import Record, attempt_name
from resilience.runtime.door import AGENTS
from tests.resilience.agent.runs import ROOT, Run, fault, plan
from tests.tokens import write_token


def drain(node: str, run_dir: Path, *options: str) -> tuple[int, str]:
    """Ask as a person does; returns exit status and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "resilience.agent", "drain", node, f"--run-dir={run_dir}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@contextmanager
def agent_of_another_run() -> Iterator[str]:
    """Yield the address of one that lets nobody in."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.0)
        transport = TcpTransport(listening, token="its own", lease_s=10.0)
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                select.select([transport], [], [], 0.1)
                transport.tick(time.monotonic())
                transport.receive()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()
            transport.close()


def test_node_of_a_run_of_one_size_stays_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    token = tmp_path / "token"
    write_token(token, "that of another run")
    variables = plan(fault("tell", "gate", 0, 3), NOTE=run.note, ORDERLY=1, STEPS=1_000_000)
    agent = run.start("n0", "--nproc-per-node", "2", variables=variables)
    run.wait_for_note()
    folder = run.folder / "run"

    unknown = drain("n7", folder)
    assert unknown[0] == 2
    assert unknown[1].endswith(f"NODE: no agent of 'n7' is known in {folder}; there are: n0\n")
    (word,) = (folder / "agents").glob("[0-9a-f]*")
    left = json.loads(word.read_text()) | {"node": "n7"}
    (folder / "agents" / "killed").write_text(json.dumps(left))
    status, said = drain("n7", folder)
    assert status == 1
    assert said.endswith(": node 'n0' is there\n")
    status, said = drain("n0", folder)
    assert (status, said.partition(": n0 was not asked to leave: ")[2].partition(": ")[2]) == (
        1,
        "the run has one size; stop it, or let resilience.elastic say others\n",
    )
    status, said = drain("n0", folder, f"--token-file={token}")
    assert status == 2
    assert said.endswith(
        "argument --token-file: it holds another token than the agents of the run; allowed: the "
        f"file that they were started with, as {folder / 'run.token'}\n"
    )

    # The port of one that was killed is by now that of another run's agent.
    with agent_of_another_run() as address:
        (folder / "agents" / "killed").write_text(
            json.dumps(left | {"node": "n0", "address": address})
        )
        status, said = drain("n0", folder)
    assert (status, "the run has one size" in said, f"{address}: {AGENTS.unproven}" in said) == (
        1,
        True,
        True,
    )

    assert agent.poll() is None
    agent.terminate()
    assert run.wait() == 143, run.show()
    run.assert_nothing_left()


def test_folder_of_no_run_is_named(tmp_path: Path) -> None:
    status, said = drain("n0", tmp_path)

    assert status == 2
    assert said.endswith(
        f"argument --run-dir: {tmp_path} has no word of an agent; allowed: the folder of a run "
        "that has not ended\n"
    )


def test_run_that_has_ended_is_said_to_have(tmp_path: Path) -> None:
    """The word of an agent that was killed is left."""
    for name in ("agents", "generations"):
        (tmp_path / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    word = {"run": attempt_name("r", 0), "node": "n3", "address": f"127.0.0.1:{port}", "boot": ""}
    (tmp_path / "agents" / "killed").write_text(json.dumps(word))
    record = Record(run="r", number=0, agents=("n1", "n3"), generation=2, is_over=True)
    (tmp_path / "generations" / "run-0-ended-2").write_text(json.dumps(asdict(record)))

    unknown, killed = drain("n1", tmp_path), drain("n3", tmp_path)

    assert unknown[0] == 2
    assert unknown[1].endswith(
        f"argument --run-dir: the run in {tmp_path} has ended with exit status 0; allowed: the "
        "folder of a run that has not ended\n"
    )
    assert killed[0] == 1
    assert "n3 was not asked to leave: the run has ended with exit status 0; 127.0" in killed[1]

    # Another start of the run has begun, and an agent of it has not told more so far.
    (tmp_path / "agents" / "new").write_text(json.dumps(word | {"run": "another", "node": "n0"}))
    assert "no agent of 'n1' is known" in drain("n1", tmp_path)[1]
