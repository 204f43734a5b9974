"""Finds the newest step in the tiers that all workers can have, and loads it.

What a failed load has shown is agreed on by all workers before the next one begins. A
step is left for an older one when it is no good, or after some tries: what goes on from
the older one makes it void for ever.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recipes_training.errors import CheckpointError
from recipes_training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from resilience.errors import FaultError, ResilienceError
from resilience.state.view import StateView
from resilience.tiered.client import StepOnOffer
from resilience.tiered.errors import LostError, TieredError, TierError
from resilience.tiered.loader import Loaded, ShardSource, load, whole_steps

OFFERS_MAX = 16
"""How many steps are tried, newest first."""
DAEMON_TIMEOUT_S = 30.0
"""How long a worker waits for a daemon that is just being started, or that cannot know yet
what there is; and how long all of them try again what fails to load."""

_PAUSE_S = 0.1
_ANEW = "set resilience.tiered.namespace to another name to begin anew"

_Key = tuple[int, int]
_Fail = Callable[[int, str], None]
"""Tells that a step, and why, is no checkpoint."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why a worker has not loaded a step."""

    text: str
    is_final: bool
    """It would be the same the next time."""

    def encode(self) -> str:
        return json.dumps([self.text, self.is_final])


class TierLoader:
    """Loads one rank's part of a step, as all other ranks do theirs. For the training thread."""

    def __init__(
        self,
        client: ShardSource,
        view: StateView,
        group: WorkerGroup,
        fail: _Fail,
        *,
        topic: str = "tiers",
        advice: str = f"mend that and start the run again, or {_ANEW}",
    ) -> None:
        """`topic` is what the workers agree under, another one for each loader of a generation.

        `advice` is what a person is told to do where nothing can be loaded.
        """
        self.newest_generation = 0
        """The highest of those that were on offer."""
        self.load_s = 0.0
        """How long the last load took."""
        self._client = client
        self._view = view
        self._group = group
        self._num_shards = group.layout.num_shards
        self._fail = fail
        self._is_leader = group.rank == 0
        self._check = group.check
        self._topic = topic
        self._advice = advice

    def load_newest(self, *, newer_than: int | None, only: int | None = None) -> Loaded | None:
        """Load the newest step above `newer_than`; None where there is none. The same on all.

        With `only`, that step alone.

        Raises CheckpointError where it cannot be known which steps there are, and where
        none of those on offer could be loaded: to begin without would make them void.
        """
        failed: dict[_Key, _Problem] = {}
        reasons: dict[_Key, str] = {}
        given_up: set[_Key] = set()
        end_s = 0.0
        for number in itertools.count():
            offers = [
                each
                for each in self._agree_on_offers(number, only)
                if newer_than is None or each.step > newer_than
            ]
            offer = next((each for each in offers if _key(each) not in given_up), None)
            if offer is None:
                break
            result, own = self._load(offer, number)
            if isinstance(result, Loaded):
                self._tell({key: text for key, text in reasons.items() if key != _key(offer)})
                return result
            end_s = end_s or time.monotonic() + DAEMON_TIMEOUT_S
            failed[_key(offer)] = result
            if own or self._is_leader:
                reasons[_key(offer)] = (own or result).text
            if not self._agree_on_retry(result, number, end_s):
                given_up.add(_key(offer))
        self._tell(reasons)
        # With another state at hand, those that are no longer on offer are no loss.
        if failed and (newer_than is None or offers):
            raise CheckpointError(f"{_describe(failed)}; {self._advice}")
        return None

    def _tell(self, reasons: Mapping[_Key, str]) -> None:
        """Tell which steps were left, and why: not of one that was loaded at another try."""
        for (step, _), text in reasons.items():
            self._fail(step, text)

    def _agree_on_offers(self, number: int, only: int | None) -> list[StepOnOffer]:
        """Return the steps to try, newest first: rank 0 asks its daemon, and tells the others.

        Where it gets no answer, the lowest rank does it whose daemon gives one.
        """
        group, topic = self._group, f"{self._topic}/offers/{number}"
        own = self._find_offers(only) if self._is_leader else {}
        told = json.loads(group.first_text(topic, json.dumps(own), CHECKPOINT_TIMEOUT))
        if "error" in told:
            own = told if self._is_leader else self._find_offers(only)
            text = json.dumps(own) if "steps" in own else None
            found = group.lowest_text(topic, text, CHECKPOINT_TIMEOUT)
            if found is None:
                raise CheckpointError(
                    f"cannot tell which checkpoints there are: {told['error']}; {self._advice}"
                )
            told = json.loads(found)
        offers = [
            StepOnOffer(step=step, generation=generation, num_shards=size, shards=tuple(shards))
            for step, generation, size, shards in told["steps"]
        ]
        newest = max((each.generation for each in offers), default=0)
        self.newest_generation = max(self.newest_generation, newest)
        return offers

    def _find_offers(self, only: int | None) -> dict[str, object]:
        """Return what this node's daemon offers, or its error, as JSON data."""
        try:
            steps = [each for each in self._ask() if only in (None, each.step)][:OFFERS_MAX]
        except TieredError as error:
            return {"error": str(error)}
        rows = [[each.step, each.generation, each.num_shards, each.shards] for each in steps]
        return {"steps": rows}

    def _ask(self) -> list[StepOnOffer]:
        """Return the whole steps; waits for a daemon that starts, or that asks others."""
        end_s = time.monotonic() + DAEMON_TIMEOUT_S
        while True:
            try:
                return whole_steps(self._client, check=self._check)
            except (LostError, TierError):
                if time.monotonic() >= end_s:
                    raise
            self._pause()

    def _load(self, offer: StepOnOffer, number: int) -> tuple[Loaded | _Problem, _Problem | None]:
        """Return what was loaded, or all workers' problem; and this worker's own."""
        result = self._try(offer)
        own = result if isinstance(result, _Problem) else None
        told = self._group.first_problem(
            f"{self._topic}/load/{number}", own.encode() if own else None, CHECKPOINT_TIMEOUT
        )
        return (result if told is None else _Problem(*json.loads(told))), own

    def _try(self, offer: StepOnOffer) -> Loaded | _Problem:
        """Load this worker's part of a step."""
        began_s = time.monotonic()
        try:
            return load(
                self._client,
                self._view,
                step=offer.step,
                generation=offer.generation,
                shards=offer.shards,
                num_shards=self._num_shards,
                check=self._check,
            )
        except FaultError:
            raise
        except ResilienceError as error:
            return _Problem(str(error) or repr(error), is_final=False)
        except (ValueError, KeyError, TypeError) as error:
            return _Problem(str(error) or repr(error), is_final=True)
        finally:
            self.load_s = time.monotonic() - began_s

    def _agree_on_retry(self, problem: _Problem, number: int, end_s: float) -> bool:
        """Return whether rank 0 wants the step to be tried again; after a pause, if so."""
        own = not problem.is_final and time.monotonic() < end_s
        topic = f"{self._topic}/again/{number}"
        is_wanted = self._group.first_text(topic, json.dumps(own), CHECKPOINT_TIMEOUT) == "true"
        if is_wanted:
            self._pause()
        return is_wanted

    def _pause(self) -> None:
        """Wait a little: nothing tells of a peer, a store or a socket that somebody will mend."""
        self._check()
        time.sleep(_PAUSE_S)


def _key(offer: StepOnOffer) -> _Key:
    return offer.step, offer.generation


def _describe(failed: Mapping[_Key, _Problem]) -> str:
    """Say which steps could not be loaded, and each reason once."""
    steps: dict[str, list[str]] = {}
    for (step, _), problem in failed.items():
        steps.setdefault(problem.text, []).append(str(step))
    parts = (f"step {', '.join(each)}: {text}" for text, each in steps.items())
    return f"no checkpoint on offer can be loaded: {'; '.join(parts)}"
