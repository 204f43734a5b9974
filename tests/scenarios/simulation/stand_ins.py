"""What stands for parts of a node that the simulation does without, and words about a node."""

from __future__ import annotations

from resilience.agent.coordination.node import MembershipNode
from resilience.agent.coordination.standing import Standing


def describe_node(name: str, member: MembershipNode, standing: Standing, *, is_paused: bool) -> str:
    """Return what an agent knows, for a failure's message."""
    view, state = member._view, member.state
    said = (
        f"{name}{' paused' if is_paused else ''}: {view.role} {view.hello.leader} "
        f"g{standing.generation} opened {standing.opened}"
    )
    if state is None:
        return said
    return (
        f"{said} leads {state.stage} g{state.generation} nodes {state.nodes} "
        f"voters {sorted(state.voters)} present {list(state.present)} "
        f"asked {sorted(state.asked)} accepted {sorted(state.accepted)} "
        f"reports {sorted(state.reports)} dead {sorted(state.dead)}"
    )
