"""How agents find each other first: the store of torch's own c10d rendezvous.

The endpoint is given as to torchrun, and the agent on its host opens the store.
Only the first meeting needs it: who wrote its address first coordinates, and
tells the others who would follow it.
"""

from __future__ import annotations

from contextlib import suppress

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError as TorchRendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

# A store lives as long as somebody holds it, and late nodes ask it for the coordinator.
_kept: list[tuple[Store, str]] = []


class RendezvousError(RuntimeError):
    """The endpoint cannot be reached."""


def find_leader(endpoint: str, run_id: str, address: str, *, timeout_s: float) -> str:
    """Return the address of the coordinator: this agent's own if nobody came before.

    Blocks until the endpoint's host is there, at most `timeout_s`.
    """
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id=run_id,
        min_nodes=1,
        max_nodes=1,
        read_timeout=max(1, round(timeout_s)),
    )
    try:
        _, store = create_backend(parameters)
        key = f"{run_id}/coordinator"
        _kept.append((store, key))
        found = store.compare_set(key, "", address)
    except (TorchRendezvousError, RuntimeError) as error:
        raise RendezvousError(
            f"no rendezvous at --rdzv-endpoint {endpoint} within {timeout_s:g} s: {error}; "
            "start an agent on that host, or look for a firewall"
        ) from error
    return found.decode()


def name_leader(address: str) -> None:
    """Tell late nodes of another coordinator, where the endpoint still lives."""
    for store, key in _kept:
        with suppress(RuntimeError):
            store.set(key, address)
