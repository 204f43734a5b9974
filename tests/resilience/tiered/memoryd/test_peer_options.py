"""What the command line says of other nodes, and how it is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resilience.tiered.memoryd.options import parse_options
from resilience.tiered.placement import Node

BASE = ["--budget-mib", "1", "--node", "a"]
LISTEN = ["--peer-listen", "127.0.0.1:7000"]


def test_a_node_without_a_door_is_alone() -> None:
    assert parse_options(BASE).peers is None


def test_peers_are_named_one_by_one() -> None:
    words = ["--peer", "b=h:1", "--peer", "c=[::1]:2;domain=r;switch=s", "--replicas", "2"]
    peers = parse_options([*BASE, *LISTEN, *words, "--domain", "q", "--switch", "t"]).peers

    assert peers is not None
    assert peers.own == Node(name="a", domain="q", switch="t")
    assert peers.listen == ("127.0.0.1", 7000)
    assert peers.peers == (
        Node(name="b", domain="", address="h:1"),
        Node(name="c", domain="r", switch="s", address="[::1]:2"),
    )
    assert (peers.replicas, peers.gone_s, peers.tls) == (2, 10.0, None)


def test_a_file_names_all_nodes(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    file.write_text("# all nodes\na=h:1\n\nb=h:2;domain=r  # the other\n")
    peers = parse_options([*BASE, *LISTEN, "--peers-file", str(file)]).peers

    assert peers is not None
    assert peers.peers == (Node(name="b", domain="r", address="h:2"),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peer", "b=h:1"], "needs --peer-listen"),
        ([*LISTEN, "--peer", "b"], "is no peer; want NAME=HOST:PORT"),
        ([*LISTEN, "--peer", "b=h:1;rack=2"], "is no peer"),
        ([*LISTEN, "--peer", "b=h"], "is not HOST:PORT"),
        ([*LISTEN, "--peer", "b=h:1", "--peer", "b=h:2"], "want each name once"),
        ([*LISTEN, "--peers-file", "none"], "cannot be read"),
        ([*LISTEN, "--replicas", "-1"], "--replicas: '-1': Input should be greater"),
        ([*LISTEN, "--tls-ca", "f"], "needs --tls-key and --tls-ca"),
        ([*LISTEN, "--peer-gone-s", "0"], "--peer-gone-s: '0': Input should be greater"),
        (["--peer-listen", "0.0.0.0:7000"], "needs --token-file"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options([*BASE, *words])
    assert re.search(message, capsys.readouterr().err)
