"""Programs as torchrun starts them: all ranks start anew after a fault."""

from __future__ import annotations

from tests.resilience.agent.runs import PLAIN_PROGRAM, Run

PROGRAM = (str(PLAIN_PROGRAM),)
RANKS = ("--nproc-per-node", "2", "--spares", "2")


def test_all_ranks_start_anew_with_a_fresh_store(run: Run) -> None:
    """Spares are made again and used again."""
    run.start("n0", *RANKS, program=PROGRAM, warm="imports", variables={"NUM_DEATHS": "3"})

    assert run.wait() == 0, run.show()
    assert run.digests() == {0: "3.0", 1: "3.0"}
    starts = {each.name: each.read_text() for each in (run.folder / "out").glob("start-*")}
    assert set(starts) == {f"start-{count}-{rank}" for count in range(4) for rank in range(2)}
    assert {text.split()[0] for text in starts.values()} == {"nobody"}
    assert len({text.split()[1] for text in starts.values()}) == 4
    assert [each.event for each in run.events()].count("worker_replaced") == 6
    run.assert_nothing_left()
