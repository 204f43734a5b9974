"""How much memory checkpoints take: at rest, and at most while a step is saved.

    python -m benchmarks.checkpoint_memory PLAN

Counted are the proportional set sizes of ranks and daemons, and all files of the daemons'
folders: what is mapped counts as a file, once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.checkpoint_nodes import (
    LIMIT_S,
    OWN,
    make_client,
    run_nodes,
    wait_alone,
    wait_held,
)
from benchmarks.checkpoint_ours import GENERATION, RankView
from benchmarks.checkpoint_state import (
    Plan,
    Ranks,
    change,
    check_alive,
    end,
    join,
    make_state,
    read_plan,
    start_ranks,
    until,
)
from resilience.tiered.saver import Saver

PEER = "peer"
WARM_STEPS = 2
"""After so many saves all memory is there that is used again."""
DEVICE_S = 0.5
SAMPLE_S = 0.02
BASE, REST, PEAK = "before the first save", "at rest", "peak"


def run_rank(plan: Plan, rank: int, ranks: Ranks) -> None:
    """Save one step after the other; say when one begins and when its memory is at rest."""
    state = make_state(plan, rank)
    own, peer = make_client(plan, OWN), make_client(plan, PEER)
    saver = Saver(own, num_shards=plan.num_ranks, has_begun=True)
    own.status()
    meet(ranks, plan.folder, BASE)
    for step in range(1, plan.laps + WARM_STEPS + 1):
        change(state, step)
        ranks.barrier()
        saving = saver.start(RankView(str(rank), state), step=step, generation=GENERATION)
        time.sleep(DEVICE_S)
        saving.wait(LIMIT_S)
        if rank == 0:
            wait_held(peer, step, plan.num_ranks)
            for client in (own, peer):
                wait_alone(client, step)
        meet(ranks, plan.folder, f"step-{step}")


def meet(ranks: Ranks, folder: Path, name: str) -> None:
    """Tell the main process where all ranks are, and wait until it lets them go on."""
    ranks.barrier()
    if ranks.rank == 0:
        (folder / f"at-{name}").touch()
    with until(f"word to go on from {name}", LIMIT_S) as pause:
        while not (folder / f"from-{name}").exists():
            pause()
    ranks.barrier()


def run(plan: Plan) -> None:
    """Run daemons and ranks, and measure."""
    with run_nodes(plan, (OWN, PEER)) as daemons:
        children = start_ranks(plan, "ranks", run_rank)
        pids = [*children, *(each.pid for each in daemons)]
        try:
            figures = measure(plan, children, lambda: count_bytes(pids, plan.folder))
            join(children)
        except BaseException:
            end(children)
            raise
    (plan.folder / "figures.json").write_text(json.dumps(figures))


def measure(
    plan: Plan, children: Sequence[int], count: Callable[[], int]
) -> dict[str, list[float]]:
    """Return bytes before the first save and at rest, and the most within each save."""
    figures: dict[str, list[float]] = {BASE: [], REST: [], PEAK: []}
    for step in range(plan.laps + WARM_STEPS + 1):
        name = f"step-{step}" if step else BASE
        peak = watch(plan.folder / f"at-{name}", children, count)
        if step == 0:
            figures[BASE].append(count())
        elif step > WARM_STEPS:
            figures[PEAK].append(peak)
            figures[REST].append(count())
        (plan.folder / f"from-{name}").touch()
    return figures


def watch(path: Path, children: Sequence[int], count: Callable[[], int]) -> int:
    """Return the most that is counted until there is a file."""
    peak, end_s = 0, time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > end_s:
            raise SystemExit(f"{path.name} did not come within {LIMIT_S:.0f} s")
        check_alive(children)
        peak = max(peak, count())
        time.sleep(SAMPLE_S)
    return peak


def count_bytes(pids: Sequence[int], folder: Path) -> int:
    """Return what processes have alone or share, and what the files of a folder take."""
    total = sum(each.lstat().st_blocks * 512 for each in folder.rglob("*"))
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("Pss_Anon", "Pss_File"):
                total += int(rest.split()[0]) << 10
    return total


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(read_plan(sys.argv[1]))
