"""Runs whose agents have TLS."""

from __future__ import annotations

import pytest

from resilience.runtime.door import SPEAKS_PLAIN, SPEAKS_TLS
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, plan
from tests.resilience.agent.test_drain import drain
from tests.tokens import write_token

JOB = ("--nnodes", "2", "--nproc-per-node", "1", "--spares", "1")


def test_two_agents_go_on_through_a_killed_worker(run: Run, undisturbed: Undisturbed) -> None:
    token = f"--token-file={write_token(run.folder / 'token')}"
    for node in ("n0", "n1"):
        run.start(node, *JOB, token, "--tls", variables=plan(fault("kill", "forward", 1, 2)))

    assert [run.wait(node) for node in ("n0", "n1")] == [0, 0], run.show()
    assert run.happened() == [0]
    run.assert_same(undisturbed(2, 6))


@pytest.mark.parametrize(("tls", "problem"), [((), SPEAKS_TLS), (("--tls",), SPEAKS_PLAIN)])
def test_one_side_alone_that_has_tls_is_told_so(
    run: Run, tls: tuple[str, ...], problem: str
) -> None:
    """So are a further agent and `drain`."""
    token = f"--token-file={write_token(run.folder / 'token')}"
    other = () if tls else ("--tls",)
    told = plan(fault("tell", "import", -1), NOTE=run.note)
    run.start("n0", *JOB, token, *other, variables=told)
    run.wait_for_note()
    run.start("n1", *JOB, token, *tls, "--join-deadline-s", "5")
    status, said = drain("n0", run.folder / "run", token, *tls)

    assert (status, problem in said) == (1, True), said
    assert run.wait("n1") != 0
    assert f"127.0.0.1:{run.port}: {problem}" in run.text("n1"), run.show()
    run.kill("n0")
    run.assert_nothing_left()
