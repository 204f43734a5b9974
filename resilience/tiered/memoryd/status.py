"""What a daemon says of the checkpoints of all nodes, as JSON data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resilience.tiered.catalog import Catalog, StepState
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.http_spaces import PREFIX as HTTP_PREFIX
from resilience.tiered.shard import ShardMeta
from resilience.tiered.uploads import View, find_wanted, judge
from resilience.tiered.vault import Vault


def describe_board(board: Board) -> dict[str, Any]:
    """Return who is there, and of each namespace which step is where and what is on its way."""
    views = board.views(with_http=True)
    return {
        "nodes": board.living(),
        "jobs": {view.namespace: _describe(board, view) for view in views},
    }


def _describe(board: Board, view: View) -> dict[str, Any]:
    catalog = judge(view)
    lag: dict[str, Any] = {"peers": _lag_of_peers(view, catalog), "store": None}
    if board.shelf and not view.namespace.startswith(HTTP_PREFIX):
        lag["store"] = lag_of_store(view, catalog)
    return {
        "job": board.vault.job_of(view.namespace),
        "lag": lag,
        "steps": [_describe_step(view, each) for each in catalog.steps],
    }


def _describe_step(view: View, state: StepState) -> dict[str, Any]:
    ram: dict[str, int] = {}
    for copy in (each for held in state.copies.values() for each in held if each.tier == "ram"):
        ram[copy.place] = ram.get(copy.place, 0) + 1
    return {
        "step": state.at.step,
        "generation": state.at.generation,
        "num_shards": state.num_shards,
        "num_bytes": _num_bytes(state, state.copies),
        "shards_here": [
            shard
            for shard, held in state.copies.items()
            if any((each.tier, each.place) == ("ram", view.own) for each in held)
        ],
        "ram": dict(sorted(ram.items())),
        "store": sum(any(each.tier != "ram" for each in held) for held in state.copies.values()),
        "tiers": sorted(state.whole_tiers),
        "is_complete": state.is_complete,
        "is_stale": state.is_stale,
        "reason": state.reason,
    }


def _lag_of_peers(view: View, catalog: Catalog) -> dict[str, Any]:
    """Return what is in too few failure domains, of the steps since the last that is not."""
    num_shards = num_bytes = 0
    since_s = view.now_s
    for state in catalog.steps:
        if state.is_stale:
            continue
        if "ram" in state.whole_tiers:
            break
        thin = [
            shard
            for shard, held in state.copies.items()
            if len({view.living[c.place] for c in held if c.tier == "ram" and not c.is_passing})
            < catalog.num_domains
        ]
        thin = [each for each in thin if any(c.tier == "ram" for c in state.copies[each])]
        if thin:
            num_shards, num_bytes = num_shards + len(thin), num_bytes + _num_bytes(state, thin)
            since_s = min(since_s, view.since_s.get(state.at, view.now_s))
    return _lag(num_shards, num_bytes, view.now_s - since_s)


def lag_of_store(view: View, catalog: Catalog) -> dict[str, Any]:
    """Return what the store has to get and has not; equal bytes count once."""
    sizes: dict[str, int] = {}
    since_s, num_shards = view.now_s, 0
    for tier in view.settings.lower:
        stored = {each.digest for each in view.copies if each.tier == tier}
        for at in find_wanted(view, catalog, tier):
            for held in catalog.states[at].copies.values():
                if not any(each.tier == tier for each in held):
                    num_shards += 1
                    since_s = min(since_s, view.whole_since_s.get(at, view.now_s))
                    if held[0].digest not in stored:
                        sizes[held[0].digest] = held[0].num_bytes
    return _lag(num_shards, sum(sizes.values()), view.now_s - since_s)


def _lag(num_shards: int, num_bytes: int, seconds: float) -> dict[str, Any]:
    return {"num_shards": num_shards, "num_bytes": num_bytes, "seconds": round(seconds, 3)}


def _num_bytes(state: StepState, shards: Iterable[str]) -> int:
    return sum(state.copies[each][0].num_bytes for each in shards)


def describe_vault(vault: Vault) -> dict[str, Any]:
    """Return what a vault holds, by namespace and step, newest first, as JSON data."""
    steps: dict[str, dict[tuple[int, int], list[ShardMeta]]] = {}
    for each in vault.metas():
        of_step = steps.setdefault(each.id.namespace, {})
        of_step.setdefault((each.id.step, each.id.generation), []).append(each)
    return {
        "budget_bytes": vault.budget_bytes,
        "total_bytes": vault.total_bytes,
        "held_bytes": vault.held_bytes,
        "namespaces": {
            namespace: [
                {
                    "step": step,
                    "generation": generation,
                    "num_shards": metas[0].num_shards,
                    "num_held": len(metas),
                    "num_bytes": sum(each.num_bytes for each in metas),
                }
                for (step, generation), metas in sorted(of_step.items(), reverse=True)
            ]
            for namespace, of_step in sorted(steps.items())
        },
    }
