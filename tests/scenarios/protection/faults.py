"""Faults at places of a protected program's steps, and what such a program ends with.

Imported by the programs of this folder, in the workers. FAULTS has words RANK@STEP:PLACE:KIND.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import resilience
from resilience.comm import gate

OUT = Path(os.environ["OUT"])
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class InjectedError(Exception):
    """What a fault raises."""


class Faults:
    """Fires each fault once in all, whatever process has the rank then."""

    def __init__(self) -> None:
        self.run: resilience.Run | None = None
        self._planned: dict[tuple[int, int, str], str] = {}
        for word in os.environ.get("FAULTS", "").split():
            place, name, kind = word.split(":")
            rank, step = place.split("@")
            self._planned[int(rank), int(step), name] = kind

    def reach(self, place: str) -> None:
        """Fire what is planned for this place."""
        step = -1 if self.run is None else self.run.index
        rank = int(os.environ.get("RANK", "0"))
        kind = self._planned.get((rank, step, place))
        if kind is None:
            return
        try:
            (OUT / f"fired-{rank}-{step}-{place}").touch(exist_ok=False)
        except FileExistsError:
            return
        if kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[kind])
        raise InjectedError(f"at {place}")

    def protect(self, model: nn.Module, optimizer: Any, also: Any = (), **options: Any) -> Any:
        """Protect as a program does, with faults at places that are not its own."""
        first = optimizer[0] if isinstance(optimizer, list) else optimizer
        self.watch(model, first)
        self.follow(resilience.protect(model, optimizer, also, **options), first)
        return self.run

    def watch(self, model: nn.Module, first: Any) -> None:
        """Reach places of a step that come before protect's own."""
        model.register_forward_pre_hook(lambda *_: self.reach("forward"))
        parameters = [each for each in model.parameters() if each.requires_grad]
        middle = parameters[len(parameters) // 2]
        middle.register_post_accumulate_grad_hook(lambda _: self.reach("backward"))
        first.register_step_pre_hook(lambda *_: self.reach("reduced"))
        real = gate.GroupChannel.reduce

        def reduce(channel: Any, buffer: Any) -> None:
            self.reach("gate")
            real(channel, buffer)
            self.reach("gate_passed")

        gate.GroupChannel.reduce = reduce  # type: ignore[method-assign]
        self.reach("set_up")

    def follow(self, run: resilience.Run, first: Any) -> None:
        """Reach places of a step that come behind protect's own."""
        self.run = run
        first.register_step_pre_hook(lambda *_: self.reach("before_update"))
        first.register_step_post_hook(lambda *_: self.reach("after_update"))


def note(run: resilience.Run, **values: Any) -> None:
    """Write values of a step down, as the program has them then."""
    rank = os.environ.get("RANK", "0")
    with (OUT / f"steps-{rank}").open("a") as file:
        file.write(json.dumps([run.index, {key: str(each) for key, each in values.items()}]) + "\n")


def digest_state(run: resilience.Run) -> dict[str, Any]:
    """Return digests by kind of state."""
    found: dict[str, Any] = {}
    for name, tensor in run.state._entries():
        kind = "/".join(name.split("/")[:2])
        value = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest = found.setdefault(kind, hashlib.blake2b(digest_size=8))
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {kind: digest.hexdigest() for kind, digest in sorted(found.items())}


def write_digest(run: resilience.Run) -> None:
    """Write down what a rank ends with: digests by kind of state, and all small state."""
    told = digest_state(run)
    told |= {"small": repr(run.state._read_small()), "cursor": run.state.cursor, "step": run.index}
    (OUT / f"end-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))
