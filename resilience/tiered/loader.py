"""Takes the state of a rank from the nearest tier that has it intact.

Shards that another number of ranks has saved are put together anew: a rank reads those
that hold parts of its tensors, and no others if their order tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from resilience.state.view import NamedTensor, Selective, StateView, leaves_out
from resilience.tiered.client import StepOnOffer, TieredClient
from resilience.tiered.errors import LostError, TierError
from resilience.tiered.lending import Check
from resilience.tiered.packing import place_tensors, unpack, unpack_parts
from resilience.tiered.resharding import Lack, lack_all, order_shards, plan_parts
from resilience.tiered.shard import ShardMeta, TensorPlace
from resilience.validation import list_some

COPIES_MAX = 8
"""How many copies of a shard are tried before it counts as lost."""

READ_TIMEOUT_S = 600.0
"""How long a shard may take to come from a peer or from S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded."""

    step: int
    generation: int
    num_bytes: int
    source: str
    """Where the bytes came from: ram, or what the daemon calls a peer or a store; several
    sources are joined by a plus sign."""
    num_bad: int
    """Copies that were tried before and were not what their checksums say."""
    rest: Mapping[str, Any]


class Lent(Protocol):
    """A shard that is being read, until the end of its context."""

    @property
    def memory(self) -> memoryview:
        """Return the shard's bytes."""

    @property
    def meta(self) -> ShardMeta:
        """Return what is known of them."""

    @property
    def source(self) -> str:
        """Return where they came from."""

    def bad(self, *, check: Check | None = None) -> bool:
        """Say that the bytes do not fit their checksums."""

    def __enter__(self) -> Lent: ...

    def __exit__(self, *error: object) -> None: ...


class ShardSource(Protocol):
    """Has steps to load: a daemon's client, or a store that is read without one."""

    def steps(self, *, check: Check | None = None) -> list[StepOnOffer]:
        """Return the steps of which there are shards, newest first. Raises TieredError."""

    def read(
        self,
        *,
        step: int,
        generation: int,
        shard: str,
        timeout_s: float = ...,
        check: Check | None = None,
    ) -> Lent:
        """Return a shard's memory; KeyError where nobody has it."""


def newest_whole(client: TieredClient) -> StepOnOffer | None:
    """Return the newest step of which every shard can be read; None without one.

    Ranks of several nodes may see different ones for a moment: let one of them decide.
    """
    return next(iter(whole_steps(client)), None)


def whole_steps(
    client: ShardSource, *, check: Callable[[], None] | None = None
) -> list[StepOnOffer]:
    """Return the steps of which every shard can be read, newest first.

    `check` is called every now and then, and may raise to end the wait.
    """
    return [each for each in client.steps(check=check) if len(each.shards) == each.num_shards]


def load(
    client: ShardSource,
    view: StateView,
    *,
    step: int,
    generation: int,
    shards: Sequence[str] = (),
    num_shards: int = 0,
    check: Callable[[], None] | None = None,
) -> Loaded:
    """Copy this rank's part of a step into the tensors of its view, and take over the rest.

    `shards` are those on offer, and `num_shards` how many this run's state has; without
    them the rank's own shard is all. Each piece is checked in the pass that copies it; a
    copy that is not what it was is reported to the daemon, and the next one is taken. `check`
    is called every now and then, and may raise to end the load.

    Raises LostError where no copy is intact, after which the tensors hold parts of several
    states; ValueError where the state that was saved is of other tensors, with those of
    the view as they were if one shard is all; and what a Selective view raises, with its
    tensors as they were. A saved tensor that the view does not list is such an error as well,
    unless a Partial view leaves it out.
    """
    own = view.shard or "0"
    taking = _Taking(client, view, step, generation, check or (lambda: None))
    order = order_shards(own, num_shards, shards) if shards else [own]
    for number, shard in enumerate(order, start=1):
        taking.take(shard, is_last=number == len(order))
        if not taking.lacking:
            break
    assert taking.rest is not None
    view.write_rest(taking.rest)
    return Loaded(
        step=step,
        generation=generation,
        num_bytes=taking.num_bytes,
        source="+".join(taking.sources),
        num_bad=taking.num_bad,
        rest=taking.rest,
    )


@dataclass(slots=True)
class _Taking:
    """One rank's tensors on their way out of shards."""

    client: ShardSource
    view: StateView
    step: int
    generation: int
    check: Callable[[], None]
    num_bytes: int = 0
    num_bad: int = 0
    rest: Mapping[str, Any] | None = None
    sources: list[str] = field(default_factory=list)
    tensors: Sequence[NamedTensor] = ()
    targets: tuple[TensorPlace, ...] = ()
    lacking: list[Lack] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors = self.view.tensors()
        self.targets = place_tensors(self.tensors)[0]
        self.lacking = lack_all(self.targets)

    def take(self, shard: str, *, is_last: bool) -> None:
        """Take what is of use in a shard; from the last one nothing unless all is there then."""
        num_bad = 0
        while num_bad < COPIES_MAX:
            try:
                loan = self.client.read(
                    step=self.step,
                    generation=self.generation,
                    shard=shard,
                    timeout_s=READ_TIMEOUT_S,
                    check=self.check,
                )
            except KeyError:
                break
            except TierError as error:
                raise self._lost(shard, str(error)) from error
            with loan:
                if self._copy(loan, is_last=is_last):
                    return
                loan.bad(check=self.check)
                num_bad += 1
                self.num_bad += 1
        raise self._lost(shard, f"{num_bad} copies were not intact" if num_bad else "nobody has it")

    def _copy(self, loan: Lent, *, is_last: bool) -> bool:
        """Copy what is of use; False where the shard is not what it was."""
        if isinstance(self.view, Selective):
            self.view.check_rest(loan.meta.rest)
        memory = np.frombuffer(loan.memory, dtype=np.uint8)
        if loan.meta.tensors == self.targets:
            if unpack(memory, loan.meta, self.tensors, on_piece=self.check) is not None:
                return False
            self._note(loan, [], loan.meta.num_bytes)
            return True
        parts, lacking = plan_parts(loan.meta.tensors, self.lacking)
        self._check_asked(loan.meta)
        if is_last and lacking:
            raise ValueError(f"step {self.step} has no {lacking[0].target.name}, or not all of it")
        num_bytes = unpack_parts(memory, loan.meta, parts, self.tensors, on_piece=self.check)
        if num_bytes is None:
            return False
        self._note(loan, lacking, num_bytes)
        return True

    def _check_asked(self, meta: ShardMeta) -> None:
        """Refuse a shard with a tensor that no view asks for: it would be dropped."""
        known = {each.name for each in self.targets}
        others = [each.name for each in meta.tensors if each.name not in known]
        names = [name for name in others if not leaves_out(self.view, name)]
        if names:
            raise ValueError(
                f"step {self.step} has {list_some(names)}, which the state that it is loaded into "
                "does not have"
            )

    def _note(self, loan: Lent, lacking: list[Lack], num_bytes: int) -> None:
        self.lacking = lacking
        self.num_bytes += num_bytes
        if self.rest is None:
            self.rest = loan.meta.rest
        if num_bytes and loan.source not in self.sources:
            self.sources.append(loan.source)

    def _lost(self, shard: str, why: str) -> LostError:
        return LostError(f"no copy of shard {shard} of step {self.step} can be read: {why}")
