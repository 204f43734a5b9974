"""Which step a world goes on from after a fault, and who brings whom there. Pure.

Every rank computes the same plan from the same reports, so nothing here may
depend on order, time or place. A *version* of the state is a step together with
the generation whose gradients made it. A plan brings all ranks to one version:

- a rank that holds it already is ready,
- a rank one update short of it, with the gradients of exactly that update and
  proof that every rank had them, rolls forward alone,
- anybody else is repaired by a copy from one of these with the same shard.

The newest version that each shard has a ready or rolling rank for is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from resilience.state.report import Phase, Report
from resilience.validation import list_some

_NO_BASE = -2
_AFTER_ENTRY = (Phase.ENTERED, Phase.PASSED)
_LOST = {
    Phase.FRESH: "no state",
    Phase.TORN_UPDATE: "failed within the update",
    Phase.TORN_REPAIR: "failed while receiving state",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One rank's whole shard on its way to another; a rolling source sends after its update."""

    source: int
    target: int
    is_same_node: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How every rank comes to the same state without a checkpoint."""

    step: int
    """Updates that every rank holds after the plan."""
    step_generation: int
    """Generation whose gradients made the last of them."""
    roll_forward: tuple[int, ...]
    """Ranks that end update step-1 -> step alone, from the gradients they hold."""
    transfers: tuple[Transfer, ...]
    """One for each rank in need; the others need nothing."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """Replicas cannot restore the state: tiers or a checkpoint have to."""

    reason: str
    missing_shards: tuple[str, ...]


class _Version(NamedTuple):
    """Ordered from old to new. Rolling ranks must share `base`, the generation of step-1."""

    step: int
    generation: int
    base: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


@dataclass(frozen=True, slots=True)
class _Trust:
    """Who holds state, and what speaks against the others, by rank."""

    holders: tuple[Report, ...]
    causes: Mapping[int, str]
    disputed: Mapping[int, str]
    """Holders whose digests differ without a majority: good for evidence, not as a source."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """Who is at a version, and who comes there alone."""

    ready: tuple[Report, ...]
    rolling: tuple[Report, ...]

    @property
    def ranks(self) -> tuple[Report, ...]:
        return self.ready + self.rolling


def plan_recovery(
    reports: Sequence[Report], *, num_members: int | None = None
) -> RecoveryPlan | Fallback:
    """Decide how the next generation gets its state from what the ranks hold.

    The order of the reports does not matter. Raises ValueError unless there is
    exactly one report for each rank from 0 on, all of the same generation. The
    ranks from `num_members` on take no part in it: what they say is evidence.

    Falls back exactly when no version can be reached for every shard: a shard
    has no healthy holder, or (a mixture that only a load cut short can leave)
    holders of different versions only.
    """
    ranks = _in_order(reports)
    trust = _judge(ranks)
    members = ranks[:num_members]
    shards = {report.shard for report in members}
    given_up: dict[str, str] = {}
    for version in sorted(_find_versions(ranks, trust.holders), reverse=True):
        reach = _find_reach(version, trust.holders, len(members))
        missing = shards - {report.shard for report in reach.ranks}
        if not missing:
            given_up.pop(str(version), None)
            return _plan(members, version, reach, trust, given_up)
        given_up.setdefault(str(version), _name_shards(missing))
    return _give_up(members, trust)


def _in_order(reports: Sequence[Report]) -> tuple[Report, ...]:
    ranks = tuple(sorted(reports, key=lambda report: report.rank))
    if not ranks:
        raise ValueError("no reports to plan from")
    if [report.rank for report in ranks] != list(range(len(ranks))):
        listed = ", ".join(str(report.rank) for report in ranks)
        raise ValueError(f"{len(ranks)} reports are of ranks {listed}; want one for each from 0")
    generations = {report.generation for report in ranks}
    if len(generations) > 1:
        listed = ", ".join(map(str, sorted(generations)))
        raise ValueError(f"reports end different generations: {listed}; want one")
    return ranks


def _judge(ranks: Sequence[Report]) -> _Trust:
    """Tell holders from the rest: by what each says, then by what the majority holds."""
    causes: dict[int, str] = {}
    groups: dict[tuple[str, int, int], list[Report]] = defaultdict(list)
    for report in ranks:
        if cause := _find_cause(report):
            causes[report.rank] = cause
        elif report.digest is not None:
            groups[report.shard, report.step, report.step_generation].append(report)
    disputed: dict[int, str] = {}
    for group in groups.values():
        votes = Counter(report.digest for report in group)
        if len(votes) == 1:
            continue
        digest, count = votes.most_common(1)[0]
        for report in group:
            if 2 * count <= len(group):
                disputed[report.rank] = f"digest {report.digest}, no majority"
            elif report.digest != digest:
                causes[report.rank] = f"digest {report.digest}, majority has {digest}"
    holders = tuple(report for report in ranks if report.rank not in causes)
    return _Trust(holders, causes, disputed)


def _find_cause(report: Report) -> str | None:
    """Say why the rank's memory counts as none; None where it counts."""
    if report.phase in _LOST:
        return _LOST[report.phase]
    if report.member_generation != report.generation:
        return f"no member of generation {report.generation}"
    return None if report.is_healthy else "own check found the state changed"


def _find_versions(ranks: Sequence[Report], holders: Sequence[Report]) -> set[_Version]:
    """Collect what holders are at, and what a passed gate lets them reach alone."""
    held = {_Version(report.step, report.step_generation, _NO_BASE) for report in holders}
    passed = {_make_next(report) for report in holders if report.phase is Phase.PASSED}
    entered = {_make_next(report) for report in holders if report.phase is Phase.ENTERED}
    ended = {version for version in entered if version._replace(base=_NO_BASE) in held}
    return held | passed | ended | _find_torn(ranks, holders)


def _find_torn(ranks: Sequence[Report], holders: Sequence[Report]) -> set[_Version]:
    """Return the versions that a tear proves: who began an update had passed its gate.

    Counts only where each holder of the newest step still has the gradients.
    """
    top = max((report.step for report in holders), default=-1)
    newest = [report for report in holders if report.step == top]
    generations = {report.gradient_generation for report in newest}
    if len(generations) != 1 or any(report.phase not in _AFTER_ENTRY for report in newest):
        return set()
    if not any(_is_torn_after(report, top, generations) for report in ranks):
        return set()
    return {_make_next(report) for report in newest}


def _is_torn_after(report: Report, step: int, generations: Iterable[int]) -> bool:
    return (
        report.phase is Phase.TORN_UPDATE
        and report.member_generation == report.generation
        and report.step == step
        and report.gradient_generation in generations
    )


def _make_next(report: Report) -> _Version:
    return _Version(report.step + 1, report.gradient_generation, report.step_generation)


def _find_reach(version: _Version, holders: Sequence[Report], num_members: int) -> _Reach:
    at = (version.step, version.generation)
    members = [report for report in holders if report.rank < num_members]
    return _Reach(
        tuple(report for report in members if (report.step, report.step_generation) == at),
        tuple(
            report
            for report in members
            if report.phase in _AFTER_ENTRY and _make_next(report) == version
        ),
    )


def _plan(
    ranks: Sequence[Report],
    version: _Version,
    reach: _Reach,
    trust: _Trust,
    given_up: Mapping[str, str],
) -> RecoveryPlan | Fallback:
    """Make the plan for a version that each shard can reach, digests permitting."""
    sources = [report for report in reach.ranks if report.rank not in trust.disputed]
    missing = {report.shard for report in ranks} - {report.shard for report in sources}
    if missing:
        return _give_up_disputed(reach, trust, missing)
    able = {report.rank for report in sources}
    rolling = tuple(sorted(report.rank for report in reach.rolling if report.rank in able))
    parts = [_describe_reach(ranks, version, reach, able)]
    if targets := [report for report in ranks if report.rank not in able]:
        parts.append(f"repaired: {_describe_causes(targets, version, trust)}")
    histories = {
        report.step_generation for report in trust.holders if report.step == version.step
    } | {version.generation}
    if len(histories) > 1:
        listed = ", ".join(map(str, sorted(histories - {version.generation})))
        parts.append(
            f"two histories of step {version.step}: that of generation {version.generation} "
            f"is kept, that of generation {listed} dropped"
        )
    parts += [f"given up: {name}, held by nobody for {lost}" for name, lost in given_up.items()]
    return RecoveryPlan(
        step=version.step,
        step_generation=version.generation,
        roll_forward=rolling,
        transfers=_plan_transfers(targets, sources),
        reason="; ".join(parts),
    )


def _plan_transfers(targets: Sequence[Report], sources: Sequence[Report]) -> tuple[Transfer, ...]:
    """Give each target one source: one on its node, else the one that sends least so far.

    Who has a source at home is served first, so that the others know the load.
    """
    by_shard: dict[str, list[Report]] = defaultdict(list)
    for source in sources:
        by_shard[source.shard].append(source)
    homes = {(source.shard, source.node) for source in sources}
    load: Counter[int] = Counter()
    links: Counter[str] = Counter()
    transfers = []
    for target in sorted(targets, key=lambda each: (each.shard, each.node) not in homes):
        is_same_node = (target.shard, target.node) in homes
        source = min(
            (s for s in by_shard[target.shard] if not is_same_node or s.node == target.node),
            key=lambda each: (load[each.rank], links[each.node], each.rank),
        )
        load[source.rank] += 1
        links[source.node] += not is_same_node
        transfers.append(
            Transfer(source=source.rank, target=target.rank, is_same_node=is_same_node)
        )
    return tuple(sorted(transfers, key=lambda transfer: transfer.target))


def _describe_reach(
    ranks: Sequence[Report], version: _Version, reach: _Reach, able: set[int]
) -> str:
    ready = [report.rank for report in reach.ready if report.rank in able]
    rolling = [report.rank for report in reach.rolling if report.rank in able]
    texts = []
    if ready:
        texts.append(f"held by {_name_ranks(ready, of=len(ranks))}")
    if rolling:
        proof = _describe_proof(ranks, version, reach)
        texts.append(f"finished alone by {_name_ranks(rolling, of=len(ranks))}, as {proof}")
    return f"resume at step {version.step}: " + "; ".join(texts)


def _describe_proof(ranks: Sequence[Report], version: _Version, reach: _Reach) -> str:
    passed = [report.rank for report in reach.rolling if report.phase is Phase.PASSED]
    if reach.ready:
        return "its gate was passed"
    if passed:
        return f"{_name_ranks(passed)} passed the gate"
    torn = [
        report.rank
        for report in ranks
        if _is_torn_after(report, version.step - 1, (version.generation,))
    ]
    if not torn:
        return "a rank that has left since holds it"
    return f"{_name_ranks(torn)} failed after the gate"


def _describe_causes(reports: Iterable[Report], version: _Version | None, trust: _Trust) -> str:
    """List the ranks by what is wrong with each, the most frequent first."""
    by_cause: dict[str, list[int]] = defaultdict(list)
    for report in reports:
        cause = trust.causes.get(report.rank) or trust.disputed.get(report.rank)
        if cause is None:
            cause = f"at step {report.step}"
            if version and report.step == version.step:
                cause += f" of generation {report.step_generation}"
        by_cause[cause].append(report.rank)
    texts = [
        f"{_name_ranks(ranks)} ({cause})"
        for cause, ranks in sorted(by_cause.items(), key=lambda item: (-len(item[1]), item[1]))
    ]
    return list_some(texts)


def _give_up(ranks: Sequence[Report], trust: _Trust) -> Fallback:
    shards = {report.shard for report in ranks}
    missing = shards - {report.shard for report in trust.holders}
    if all(report.phase is Phase.FRESH for report in ranks):
        reason = f"no rank holds state: {_name_ranks(range(len(ranks)), of=len(ranks))} fresh"
    elif missing:
        lost = [report for report in ranks if report.shard in missing]
        causes = _describe_causes(lost, None, trust)
        reason = f"no healthy holder of {_name_shards(missing)}: {causes}"
    else:
        newest: dict[str, Report] = {}
        for report in sorted(trust.holders, key=lambda r: (r.step, r.step_generation)):
            newest[report.shard] = report
        top = max(newest.values(), key=lambda r: (r.step, r.step_generation))
        at = (top.step, top.step_generation)
        missing = shards - {r.shard for r in trust.holders if (r.step, r.step_generation) == at}
        held = [
            f"{_name_shards([shard])} at step {newest[shard].step} "
            f"of generation {newest[shard].step_generation}"
            for shard in sorted(newest)
        ]
        reason = f"no step is held for every shard: newest are {list_some(held)}"
    return Fallback(reason=reason, missing_shards=tuple(sorted(missing)))


def _give_up_disputed(reach: _Reach, trust: _Trust, missing: set[str]) -> Fallback:
    votes = [
        f"rank {report.rank} has {report.digest} at step {report.step}"
        for report in sorted(reach.ranks, key=lambda report: report.rank)
        if report.rank in trust.disputed and report.shard in missing
    ]
    return Fallback(
        reason=f"no majority among the digests of {_name_shards(missing)}: {', '.join(votes)}",
        missing_shards=tuple(sorted(missing)),
    )


def _name_shards(shards: Iterable[str]) -> str:
    return list_some([f"shard {shard}" if shard else "the whole state" for shard in sorted(shards)])


def _name_ranks(ranks: Iterable[int], *, of: int = 0) -> str:
    """Write ranks as ranges; `of` is the world size where 'all' may stand for it."""
    numbers = sorted(ranks)
    if of and len(numbers) == of:
        return f"all {of} ranks"
    spans: list[list[int]] = []
    for rank in numbers:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    texts = ["-".join(map(str, span)) for span in spans]
    return f"rank{'s' if len(numbers) > 1 else ''} {list_some(texts)}"
