"""What a program is told that is alone on its node."""

from __future__ import annotations

from resilience.comm.messages import Open
from resilience.inprocess.variables import fill_in, node_variables
from resilience.state.layout import make_layout

OPENING = Open(
    generation=3,
    rank=1,
    local_rank=0,
    layout=make_layout(nodes=("a", "b"), num_local_ranks=1),
    head="fd00::1:20007",
)


def test_program_that_is_alone_is_told_its_node_and_the_head_and_nothing_of_ranks() -> None:
    assert node_variables(OPENING) == {
        "NODE_RANK": "1",
        "NUM_NODES": "2",
        "HEAD_ADDR": "fd00::1",
        "HEAD_PORT": "20007",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "RESILIENCE_GENERATION": "3",
    }


def test_places_in_a_command_are_filled_in_and_other_braces_are_not() -> None:
    command = [
        "--at={node_rank}",
        "{head_addr}:{head_port}",
        "{num_nodes}",
        "{other}{}",
        "{run_dir}/out",
    ]
    places = {**node_variables(OPENING), "LAUNCHER_RUN_DIR": "/runs/a b"}

    assert fill_in(command, places, is_alone=True) == [
        "--at=1", "fd00::1:20007", "2", "{other}{}", "/runs/a b/out",
    ]  # fmt: skip
    assert fill_in(command, places, is_alone=False) == [*command[:-1], "/runs/a b/out"]
    assert fill_in(command, {}, is_alone=False) == command
