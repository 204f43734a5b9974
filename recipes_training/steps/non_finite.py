"""What becomes of a step whose loss or gradient norm is not finite. Pure.

All ranks see such a step alike, take it once more, and tell each other what each knows by
itself: whether its own part came out with other bits, and the digest of its state. From
this everybody draws the same verdict:

- a rank whose own part had other bits, or whose state is not that of the other holders of
  its shard, is the cause: silent corruption;
- the same again on sound states is the batch or the recipe, and would come again;
- what is gone without a rank that had other bits came about between them.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from recipes_training.data.order import Split
from recipes_training.trainer import StepResult

_NAMED_MAX = 4
"""More ranks than this make a message no clearer."""
SKIPS_IN_A_ROW_MAX = 8
"""Whoever skips more steps in a row has no bad batch, but a run that does not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one rank knows by itself of a step that it has taken twice."""

    has_changed: bool
    """Its own part had other bits the second time."""
    is_finite: bool
    """Its own part was finite the second time."""
    shard: str
    state: str
    """Digest of the state that the step began with, and has not changed."""

    def to_text(self) -> str:
        """Return it as other ranks are told it."""
        return json.dumps(asdict(self))


def read_evidence(told: Mapping[int, str]) -> list[Evidence]:
    """Return what the ranks told, in their order."""
    return [Evidence(**json.loads(told[rank])) for rank in sorted(told)]


def same_bits(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two parts are equal; one NaN is like another."""
    return [each.hex() for each in first] == [each.hex() for each in second]


class Outcome(Enum):
    """What a step that was not finite comes to."""

    CORRUPT = "corrupt"
    """The states or parts of some ranks are not to be trusted."""
    REPEATED = "repeated"
    """It would come again."""
    GONE = "gone"
    """It is finite now, and no rank had other bits by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The same on all ranks."""

    outcome: Outcome
    ranks: tuple[int, ...]
    """Those that are corrupt, or whose own part was not finite; none where none stands out."""
    text: str
    """What was seen, for a person."""


def judge(first: StepResult, second: StepResult, evidence: Sequence[Evidence]) -> Verdict:
    """Return what to do about a step that was not finite when it was taken first."""
    seen = _describe(first)
    # First the states: the other ranks of a copy compute with what one of them holds.
    if odd := _find_odd(evidence):
        text = f"{seen}; {name_ranks(odd)} {_hold(odd)} a state that other holders do not have"
        return Verdict(outcome=Outcome.CORRUPT, ranks=odd, text=text)
    changed = _ranks_where([each.has_changed for each in evidence])
    # Where nobody's bits come again they say nothing about a rank.
    if changed and (len(changed) < len(evidence) or len(evidence) == 1):
        text = f"{seen}; {name_ranks(changed)} computed other bits when the step was run again"
        return Verdict(outcome=Outcome.CORRUPT, ranks=changed, text=text)
    if second.is_finite:
        text = f"{seen}, and not when the step was run again; no rank had other bits by itself"
        return Verdict(outcome=Outcome.GONE, ranks=(), text=text)
    causes = _ranks_where([not each.is_finite for each in evidence])
    if len(causes) == len(evidence):
        causes = ()
    return Verdict(outcome=Outcome.REPEATED, ranks=causes, text=f"{seen}, twice with the same bits")


def _describe(result: StepResult) -> str:
    if math.isfinite(result.grad_norm):
        return f"the loss is {result.loss}"
    return f"the gradient norm is {result.grad_norm}"


def _ranks_where(claims: Sequence[bool]) -> tuple[int, ...]:
    return tuple(rank for rank, claim in enumerate(claims) if claim)


def _find_odd(evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """Return the ranks that are outvoted about their shard's state; all that differ in a tie."""
    by_shard: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(evidence):
        by_shard[each.shard].append(rank)
    odd: list[int] = []
    for ranks in by_shard.values():
        state, votes = Counter(evidence[rank].state for rank in ranks).most_common(1)[0]
        has_majority = 2 * votes > len(ranks)
        odd += [rank for rank in ranks if not has_majority or evidence[rank].state != state]
    return tuple(sorted(odd))


def _hold(ranks: Sequence[int]) -> str:
    return "holds" if len(ranks) == 1 else "hold"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return 'rank 3', or 'ranks 0, 3 and 7'."""
    names = [str(rank) for rank in ranks[:_NAMED_MAX]]
    if len(ranks) > _NAMED_MAX:
        names.append(f"{len(ranks) - _NAMED_MAX} more")
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def describe_samples(split: Split, *, step: int, ranks: Sequence[int]) -> str:
    """Name the positions, in the order of the data, of the samples that ranks have in a step.

    Without ranks those of the whole step.
    """
    if not ranks:
        first = split.sample_of(step)
        return f"on all ranks, samples {first} to {first + split.global_batch_size - 1}"
    parts = []
    for rank in ranks[:_NAMED_MAX]:
        numbers = split.micro_batches(rank)
        begin = split.positions(step=step, micro_batch=numbers[0]).start
        end = split.positions(step=step, micro_batch=numbers[-1]).stop
        parts.append(f"rank {rank}, samples {begin} to {end - 1}")
    if len(ranks) > _NAMED_MAX:
        parts.append(f"and {len(ranks) - _NAMED_MAX} more ranks")
    return f"on {', '.join(parts)}"


def follows_too_many(skipped: Sequence[int], step: int) -> bool:
    """Return whether the steps just before one were skipped, as many as may be in a row."""
    before = range(step - SKIPS_IN_A_ROW_MAX, step)
    return set(before) <= set(skipped)
