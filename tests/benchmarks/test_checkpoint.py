from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint
from benchmarks import checkpoint_figures as figures
from benchmarks.checkpoint_state import (
    Plan,
    change,
    check_equal,
    digest,
    make_room,
    make_state,
    read_plan,
    write_plan,
)

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
OURS = {
    "clone": [0.1, 0.2, 0.3],
    "blocked": [0.01, 0.01, 0.9],
    "in line": [0.3, 0.3, 0.3],
    "own RAM": [0.3, 0.3, 0.3],
    "peer RAM": [1.0, 1.0, 1.0],
    "restore, living": [0.4, 0.4, 0.4],
    "restore, new process": [0.5, 0.5, 0.5],
    "restore from a peer": [1.0, 1.0, 1.0],
}


def small_plan(folder, **changes):
    return Plan(folder=folder, mib_per_rank=8, num_tensors=64, **changes)


def test_bars_compare_medians_with_the_clone_beside_them():
    bars = {each.what: each for each in figures.judge({"ours": OURS}, 1)}

    assert bars["in line, x clone"].figure == pytest.approx(1.5)
    assert not bars["in line, x clone"].is_held
    assert bars["blocked, x clone"].figure == pytest.approx(0.05)
    assert bars["blocked, x clone"].is_held
    assert len(bars) == len(figures.TIMES)


def test_bars_of_memory_are_beyond_the_training_state_and_beyond_the_rest():
    rows = {"memory": {figures.BASE: [100], figures.REST: [410], figures.PEAK: [430]}}

    rest, added = figures.judge(rows, 100)

    assert (rest.figure, rest.is_held) == (pytest.approx(3.1), True)
    assert (added.figure, added.is_held) == (pytest.approx(0.2), False)


def test_our_door_is_held_against_the_minimal_daemon():
    aws = {"own RAM": [3.0], "restore, living": [2.0]}
    minimal = {"own RAM": [2.0], "restore, living": [2.0]}

    held = [each.is_held for each in figures.judge({"aws": aws, "aws-minimal": minimal}, 1)]

    assert held == [False, True]


def test_state_has_the_size_that_was_asked_for_and_is_another_one_in_each_rank(tmp_path):
    plan = small_plan(tmp_path)

    state, other = make_state(plan, 0), make_state(plan, 1)

    assert len(state) == 64
    assert sum(each.nbytes for each in state.values()) == 8 << 20
    assert len({each.nbytes for each in state.values()}) >= 6
    assert not state.keys() & other.keys()
    assert digest(state) != digest(other)
    assert digest(state) == digest(make_state(plan, 0))
    assert not any(torch.isnan(each).any() for each in state.values())


def test_room_that_lacks_a_step_is_told_from_the_state(tmp_path):
    plan = small_plan(tmp_path)
    state, room = make_state(plan, 0), make_room(plan, 0)
    for name, each in room.items():
        each.copy_(state[name])
    check_equal(state, room)

    change(state, 5)

    with pytest.raises(SystemExit, match="was not restored bit by bit"):
        check_equal(state, room)


def test_plan_passes_a_command_line(tmp_path):
    plan = small_plan(tmp_path, laps=3, options={"url": "http://127.0.0.1:1"})

    assert read_plan(write_plan(plan)) == plan


def test_unknown_row_is_refused_with_the_names_that_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.checkpoint", "--rows", "ours,theirs"])

    with pytest.raises(SystemExit, match="2"):
        checkpoint.main()

    assert "no theirs; known: ours, memory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_benchmark_measures_ours_and_restores_the_same_bits(tmp_path):
    """Whatever a restore brings back other than the saved bits ends it with status 1."""
    table = tmp_path / "table.json"

    options = "--rows ours,memory,torch.save --laps 1 --mib-per-rank 8 --tensors 64 --force-load"
    command = [sys.executable, "-m", "benchmarks.checkpoint", *options.split(), "--json", table]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert ended.returncode == 0, ended.stderr
    rows = json.loads(table.read_text())["rows"]
    assert rows["ours"].keys() >= {*figures.COLUMNS, "in line", "clone", "memcpy"}
    assert all(len(laps) == 1 for laps in rows["ours"].values())
    assert rows["torch.save"].keys() == {"clone", "blocked", "own RAM", "restore, living"}
    assert len(json.loads(table.read_text())["bars"]) == len(figures.TIMES) + 2
    assert not list(Path("/dev/shm").glob("bench-checkpoint-*"))
