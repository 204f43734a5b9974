"""What a vault knows of a namespace beside its shards: whose it is, and which histories it saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from resilience.tiered.errors import RefusedError, StaleError, VaultFullError
from resilience.tiered.stores.owner import NamespaceOwner

RUNS_MAX = 64
"""Of so many runs it is known where they went on; of older ones nothing is left to tell from."""

Runs = Mapping[int, int]
"""By the number that a run's generations count from: the step that it went on from."""


@dataclass(slots=True)
class _Namespace:
    """What is known of a namespace beside its shards."""

    job: str | None = None
    num_claims: int = 0
    newest: dict[int, int] = field(default_factory=dict)
    """The last step that each generation wrote, where no newer generation is as far."""
    runs: dict[int, int] = field(default_factory=dict)
    """Where each run of the job went on, the oldest first; see `Runs`."""
    owner: NamespaceOwner | None = None
    """Whose it is in the store, where that was said here."""

    def see(self, step: int, generation: int) -> None:
        """Take note of a generation that has written a step."""
        if not self.is_stale(step, generation):
            kept = {
                number: last
                for number, last in self.newest.items()
                if number > generation or last > step
            }
            self.newest = {**kept, generation: max(step, self.newest.get(generation, step))}

    def is_stale(self, step: int, generation: int) -> bool:
        """Return whether a newer generation has written this step or a later one."""
        return any(number > generation and last >= step for number, last in self.newest.items())

    def is_over(self, step: int, generation: int) -> bool:
        """Return whether a newer run went on from a step before this one: it is another history."""
        return any(first > generation and step > after for first, after in self.runs.items())

    def begin_run(self, first_generation: int, step: int) -> bool:
        """Take note of a run that goes on from a step; says whether it is new.

        Raises StaleError where a newer run has begun, or this one went on from another step.
        """
        newest = max(self.runs, default=-1)
        if self.runs.get(first_generation) == step:
            return False
        if first_generation <= newest:
            raise StaleError(
                f"a run of generations from {first_generation} on cannot go on from step {step}: "
                f"the run from {newest} on went on from step {self.runs[newest]}"
            )
        # What is said of the steps after its own goes for those that older runs went on from.
        kept = [(first, after) for first, after in self.runs.items() if after < step]
        self.runs = dict([*kept, (first_generation, step)][-RUNS_MAX:])
        return True


class Ledger:
    """All namespaces of one vault, kept in a file beside its segments. Not thread-safe."""

    def __init__(self, path: Path, is_held: Callable[[str], bool]) -> None:
        self._path = path
        self._is_held = is_held
        self._known: dict[str, _Namespace] = {}

    def load(self, names: set[str]) -> None:
        """Take over what an earlier daemon has kept of these namespaces, and of those with runs."""
        known = _read(self._path)
        told = {name for name, each in known.items() if each.runs or each.owner}
        self._known.update({name: known.get(name, _Namespace()) for name in names | told})

    def find(self, name: str) -> _Namespace | None:
        """Return what is known of a namespace."""
        return self._known.get(name)

    def open(self, name: str) -> _Namespace:
        """Return what is known of a namespace, which counts as known from now on."""
        return self._known.setdefault(name, _Namespace())

    def claim(self, name: str, job: str) -> None:
        """Count a claim of a job; RefusedError where the namespace is another one's."""
        known = self.open(name)
        if self.job_of(name) not in (None, job):
            raise RefusedError(
                f"the namespace {name!r} belongs to the job {known.job!r}, not to {job!r}"
            )
        known = self._renew(name, job)
        if known.job is None:
            known.job = job
            try:
                self._write()
            except OSError as error:
                known.job = None
                self.forget(name)
                raise VaultFullError(f"no room in {self._path.parent}: {error}") from error
        known.num_claims += 1

    def unclaim(self, name: str) -> None:
        """Count a claim no more."""
        self._known[name].num_claims -= 1
        self.forget(name)

    def job_of(self, name: str) -> str | None:
        """Return whose a namespace is: None where nobody has it, and it holds nothing."""
        known = self._known.get(name)
        return known.job if known and self._is_had(name) else None

    def is_claimed(self, name: str) -> bool:
        """Return whether a job has a claim to a namespace now."""
        return name in self._known and self._known[name].num_claims > 0

    def _is_had(self, name: str) -> bool:
        return self._known[name].num_claims > 0 or self._is_held(name)

    def begin_run(self, name: str, first_generation: int, step: int, job: str | None) -> bool:
        """Take note of a run, and keep it; see `_Namespace.begin_run`.

        `job` is whose run it is, None where it is that of whoever has the namespace.
        """
        known = self._renew(name, job)
        if job is not None and not self._is_had(name):
            known.job = job
        before = known.runs
        try:
            is_new = known.begin_run(first_generation, step)
            if is_new:
                self._write()
        except OSError as error:
            known.runs = before
            raise VaultFullError(f"no room in {self._path.parent}: {error}") from error
        return is_new

    def runs(self) -> dict[str, tuple[str | None, Runs]]:
        """Return by namespace whose it is, and the runs that it has seen."""
        return {name: (each.job, each.runs) for name, each in self._known.items() if each.runs}

    def own(self, name: str, owner: NamespaceOwner) -> None:
        """Keep whose a namespace is in the store; VaultFullError where there is no room for it."""
        known = self.open(name)
        before, known.owner = known.owner, owner
        try:
            if before != owner:
                self._write()
        except OSError as error:
            known.owner = before
            raise VaultFullError(f"no room in {self._path.parent}: {error}") from error

    def owners(self) -> dict[str, NamespaceOwner]:
        """Return by namespace whose it is in the store."""
        return {name: each.owner for name, each in self._known.items() if each.owner}

    def forget(self, name: str) -> None:
        """Let go of a namespace that nobody has and that holds nothing.

        Its runs stay known: other nodes may hold what is of older ones, and they tell only once.
        So does whose it is in the store, which a worker says once.
        """
        known = self._known.get(name)
        if known is None or known.num_claims or known.runs or known.owner or self._is_held(name):
            return
        del self._known[name]
        if known.job is not None:
            # A name too many in the file is read for namespaces alone that hold something.
            with suppress(OSError):
                self._write()

    def _renew(self, name: str, job: str | None) -> _Namespace:
        """Return what is known of a namespace; nothing of another job's that is over."""
        known = self.open(name)
        if job is not None and known.job not in (None, job) and not self._is_had(name):
            known = self._known[name] = _Namespace()
        return known

    def _write(self) -> None:
        content = {
            name: {
                "job": known.job,
                "runs": list(known.runs.items()),
                "owner": known.owner and known.owner.model_dump(),
            }
            for name, known in self._known.items()
            if known.job is not None or known.runs or known.owner
        }
        new = self._path.with_suffix(".json.new")
        new.write_text(json.dumps(content))
        new.replace(self._path)


class Claim:
    """A job's right to a namespace, as long as it is open or the namespace holds anything."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._is_open = True

    def close(self) -> None:
        """Give it back; a no-op the second time."""
        if self._is_open:
            self._is_open = False
            self._end()


def _read(path: Path) -> dict[str, _Namespace]:
    try:
        items = json.loads(path.read_bytes()).items()
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    known = {}
    for name, each in items:
        with suppress(ValueError, AttributeError, KeyError, TypeError):  # hides no other
            known[str(name)] = _Namespace(
                job=None if each["job"] is None else str(each["job"]),
                runs={int(first): int(step) for first, step in each["runs"]},
                owner=NamespaceOwner.model_validate(each["owner"]) if each.get("owner") else None,
            )
    return known
