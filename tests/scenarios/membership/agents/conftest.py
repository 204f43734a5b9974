from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import NamespaceError, Network
from tests.ports import free_ports
from tests.resilience.agent.runs import Run
from tests.scenarios.membership.agents.real_world import RealWorld

MakeWorld = Callable[..., RealWorld]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Make worlds, of which nothing is left after the test."""
    with ExitStack() as stack:

        def make(*, has_network: bool = False, **values: Any) -> RealWorld:
            ports = free_ports(values["num_nodes"] + values.get("num_standby", 0))
            run = Run(folder=tmp_path, port=ports[0])
            network = None
            if has_network:
                try:
                    network = stack.enter_context(Network(len(ports)))
                except NamespaceError as error:
                    pytest.skip(str(error))
            stack.callback(run.end)
            return RealWorld(run=run, ports=ports, network=network, **values)

        yield make
