"""Whose the namespace of the checkpoints is: found out by all workers alike, before they load.

The daemon of rank 0 asks the store; where it gives no answer, those of the others do. A store that
does not answer is asked again for a while, and then the run ends: what nobody is known to own is
neither loaded nor written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recipes_training.errors import CheckpointError, OwnedError
from recipes_training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from resilience.run_record import RECORD_FOLDER, TAKES_OVER_VARIABLE
from resilience.tiered.client import StepOnOffer, TieredClient
from resilience.tiered.errors import RefusedError, TieredError
from resilience.whole_files import write_first

OWN_TIMEOUT_S = 120.0
"""How long the store may take to say whose the namespace is."""
RETRY_S = 30.0
"""For how long a worker whose daemon or store fails asks again."""
TAKEN_FILE = "taken-over.json"
"""In the record of a run: that it has taken its namespace over, which it does once."""
_PAUSE_S = 0.5
_OK, _REFUSED, _USELESS, _FAILED = "ok", "refused", "useless", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A run that wants the namespace of a client's store."""

    run: str
    """The run's id."""
    name: str
    """By what a person knows it."""
    run_dir: Path
    max_steps: int
    """Of the run: it cannot go on from a later step."""

    @property
    def takes_over(self) -> bool:
        """Return whether the run is to take the namespace from another, and has not yet."""
        is_told = os.environ.get(TAKES_OVER_VARIABLE) == "1"
        return is_told and not (self.run_dir / RECORD_FOLDER / TAKEN_FILE).exists()


def own_namespace(client: TieredClient, group: WorkerGroup, claim: Claim) -> None:
    """Have the namespace be the run's own.

    Raises OwnedError where it is another run's, and CheckpointError where nobody can tell.
    """
    ask = partial(_ask, client, group, claim, takes_over=claim.takes_over)
    own = _try(ask, group) if group.rank == 0 else None
    told = json.loads(group.first_text("tiers/owner", json.dumps(own), CHECKPOINT_TIMEOUT))
    if told[0] == _FAILED:
        own = own if group.rank == 0 else _try(ask, group)
        answer = json.dumps(own) if own and own[0] != _FAILED else None
        found = group.lowest_text("tiers/owner", answer, CHECKPOINT_TIMEOUT)
        if found is None:
            raise CheckpointError(
                f"cannot tell whose the namespace {client.namespace!r} is: {told[1]}; mend that "
                "and start the run again"
            )
        told = json.loads(found)
    if told[0] == _USELESS:
        raise OwnedError(told[1])
    if told[0] == _REFUSED:
        raise OwnedError(
            f"{told[1]}; go on with that run (launcher continue and its folder), or once it has "
            f"ended with its checkpoints in this one (launcher continue {claim.run_dir} "
            "run.take_over=true), or begin anew with resilience.tiered.namespace=NAME; launcher "
            "clean removes what only memory has"
        )
    if own is None:
        # Each node's daemon looks from now on whether the namespace is still the run's.
        state, text = _try(partial(ask, takes_over=False), group)
        if state != _OK:
            sys.stderr.write(
                f"recipes_training: the daemon of this node does not know that the namespace "
                f"{client.namespace!r} is the run's, and would not notice if another run took it: "
                f"{text}\n"
            )


def _try(ask: Callable[[], tuple[str, str]], group: WorkerGroup) -> tuple[str, str]:
    """Return what came of it, and the words for that."""
    end_s = time.monotonic() + RETRY_S
    while True:
        group.check()
        try:
            return ask()
        except RefusedError as error:
            return _REFUSED, str(error)
        except TieredError as error:
            if time.monotonic() >= end_s:
                return _FAILED, str(error)
        time.sleep(_PAUSE_S)


def _ask(
    client: TieredClient, group: WorkerGroup, claim: Claim, *, takes_over: bool
) -> tuple[str, str]:
    if takes_over and (problem := _useless(client.steps(check=group.check), claim.max_steps)):
        return _USELESS, f"run.take_over: the namespace {client.namespace!r} {problem}"
    unseen = client.own(
        run=claim.run,
        name=claim.name,
        takes_over=takes_over,
        timeout_s=OWN_TIMEOUT_S,
        check=group.check,
    )
    if takes_over:
        content = {"namespace": client.namespace}
        write_first(claim.run_dir / RECORD_FOLDER / TAKEN_FILE, content, str(os.getpid()))
    if unseen:
        sys.stderr.write(
            f"recipes_training: took the namespace {client.namespace!r} over from "
            f"{', '.join(unseen)}, which cannot be seen from here: end it where it runs, its store "
            "takes no more of it\n"
        )
    return _OK, ""


def _useless(steps: Sequence[StepOnOffer], max_steps: int) -> str:
    """Return why a run cannot go on from another's steps, which are then left to that one."""
    if not steps:
        return "has no checkpoint; name the namespace that has some"
    newest = max(each.step for each in steps)
    if newest > max_steps:
        return f"has step {newest}, beyond trainer.max_steps {max_steps}: that has to be as many"
    return ""
