"""Checkpoints in the memory of nodes, and below it, through each node's memoryd.

A save is begun with a step, while the device computes or in line, and is committed when
the step's gate is passed: only then is the state that it copies stable. Whatever fails in
it costs that checkpoint and nothing else. Imported for jobs with resilience.tiered alone.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from launcher.job import TrainingJob
from launcher.job.lineage import checkpoints_namespace, lineage_digest, name_run
from recipes_training.backends.tier_loading import TierLoader
from recipes_training.backends.tier_owner import Claim, own_namespace
from recipes_training.checkpoints import FINISH_TIMEOUT, Begun, CadencedCheckpoints, Subject
from recipes_training.errors import CheckpointError, GroupError, TrainingError
from recipes_training.group import CHECKPOINT_TIMEOUT
from recipes_training.plan import plan_device_type
from resilience.arguments import NO_NAME, read_token
from resilience.errors import ResilienceError
from resilience.events import EventLog
from resilience.node_config import BranchPoint
from resilience.run_record import BRANCH_VARIABLE, GOES_ON_VARIABLE, RUN_VARIABLE
from resilience.settings import TieredSettings
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import LostError, TieredError
from resilience.tiered.loader import Loaded
from resilience.tiered.memoryd.local import SOCKET_NAME
from resilience.tiered.packing import place_tensors
from resilience.tiered.saver import AbandonedError, Saver, Saving

MEMORYD_DIR = "MEMORYD_DIR"
MEMORYD_TOKEN_FILE = "MEMORYD_TOKEN_FILE"
K8S_NAMESPACE = "LAUNCHER_K8S_NAMESPACE"

BRANCH_SOURCE = "branch"
"""Source of a state that another run has made."""
HISTORY = "history"
"""In the progress: what is added to generations, so that no two starts share a number."""

_STORED_PAUSE_S = 0.1
DAEMON_START_S = 20.0
"""Seconds that the last save waits for a daemon that its agent starts again."""
COMMIT_TIMEOUT_S = 20.0
"""How long a run that ends waits for its last commit."""


def open_tiers(
    job: TrainingJob, *, run_dir: Path, node: str, events: EventLog
) -> TieredCheckpoints:
    """Return a job's checkpoints through the daemon that the environment names."""
    settings = job.resilience.tiered
    assert settings is not None
    # In each namespace of a cluster pods call the folder the same.
    within = os.environ.get(K8S_NAMESPACE, "")
    path, token = _read_environment(os.environ)
    client = TieredClient(
        path,
        token=token,
        namespace=checkpoints_namespace(job, run_dir, within=within),
        # Without our agent nobody keeps a record of the run.
        job=os.environ.get(RUN_VARIABLE)
        or f"{lineage_digest(job)}-{name_run(run_dir, within=within)}",
        node=node,
    )
    return TieredCheckpoints(client, job, settings, events, run_dir=run_dir)


def _read_environment(variables: Mapping[str, str]) -> tuple[Path, str]:
    """Return the daemon's socket and token."""
    if not (folder := variables.get(MEMORYD_DIR)):
        raise TrainingError(
            f"the variable {MEMORYD_DIR} is not set, which names the folder of this node's "
            "memoryd; start the run with the launcher, or leave resilience.tiered out"
        )
    token = ""
    if name := variables.get(MEMORYD_TOKEN_FILE):
        try:
            token = read_token(name)
        except ArgumentTypeError as error:
            raise TrainingError(f"{MEMORYD_TOKEN_FILE} {error}") from error
    return Path(folder) / SOCKET_NAME, token


def _prepare_memory(client: TieredClient, num_bytes: int) -> None:
    # Where that fails the save that needs the memory says why.
    with closing(client), suppress(TieredError):
        client.prepare(num_bytes)


@dataclass(slots=True)
class _UnderWay:
    """A save that is not over, and for how long it has held up training."""

    saving: Saving
    blocked_s: float = 0.0
    is_settled: bool = False
    """It is decided whether it is committed."""


class TieredCheckpoints(CadencedCheckpoints):
    """Saves and loads one rank's shard. For the training thread."""

    def __init__(
        self,
        client: TieredClient,
        job: TrainingJob,
        settings: TieredSettings,
        events: EventLog,
        *,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(job, settings, events, clock=clock)
        self._client = client
        self._is_inline = settings.copy_while == "waiting" or (
            settings.copy_while == "auto" and plan_device_type(job) == "cpu"
        )
        self._store_tier = settings.store
        self._domains_min = settings.ram.domains_min
        self._num_domains: int | None = None
        self._nameless: set[str] = set()
        """The failure domains that were told of."""
        self._max_steps = job.trainer.max_steps
        name = f"{job.recipe.name} in {run_dir}"
        self._claim = Claim(run=client.job, name=name, run_dir=run_dir, max_steps=self._max_steps)
        self._saver: Saver
        self._under_way: _UnderWay | None = None
        self._newest = 0
        self._loaded: tuple[int, int] | None = None
        """Step and generation of the state that the run began with."""
        self._is_handed_over = False
        """The daemon has the last state, and knows that the store is to get it."""

    def bind(self, subject: Subject) -> None:
        """Take what the checkpoints are of."""
        super().bind(subject)
        # A worker saves what has come from `begin_run`, here or where its state comes from.
        num_shards = subject.group.layout.num_shards
        self._saver = Saver(self._client, num_shards=num_shards, has_begun=True)

    @property
    def place(self) -> str:
        """Return the namespace: `python -m resilience.tiered status` says where its steps are."""
        tiers = "tiers" if self._store_tier else "nodes' memory"
        return f"the {tiers}, namespace {self._client.namespace}"

    # ---- saving

    def before_update(self) -> None:
        """Return when what was begun is copied, and the update may write."""
        under_way = self._under_way
        if under_way is not None and not under_way.is_settled:
            self._await_copy(under_way)

    def keep(self) -> None:
        """Let what was begun become visible: it is what the last update left."""
        under_way = self._under_way
        if under_way is not None and not under_way.is_settled:
            under_way.saving.commit()
            under_way.is_settled = True

    def abandon(self) -> None:
        """Leave what was begun, unless it is committed already."""
        if self._under_way is not None:
            self._under_way.saving.abandon()
            self._under_way.is_settled = True
        super().abandon()

    def finish(self, step: int) -> None:
        """Save the last state, stable once all workers have come to it.

        The store gets it, too, whatever its cadence: memory may go with the run. So it does where
        the run has begun with that state, which an earlier one may not have brought there.
        """
        self._settle()
        if self._is_new:
            self._client.await_daemon(DAEMON_START_S)
            self._start(step)
            try:
                with self._subject.group.meet(f"tiers/finish/{step}", FINISH_TIMEOUT):
                    pass
            except GroupError as error:
                self.abandon()
                self._fail(step, str(error))
                return
            self.before_update()
            self._subject.progress.check()
            self.keep()
        if (under_way := self._under_way) is not None:
            under_way.saving.wait_over(COMMIT_TIMEOUT_S, check=self._subject.group.check)
            self._settle(is_final=True)
        if self._store_tier and self._is_new and self.has_saved(step):
            self._is_handed_over = self._flush(step, self._generation)
        elif self._store_tier and self._loaded and self._loaded[0] == step:
            self._is_handed_over = self._flush(*self._loaded)

    def save_part(self, step: int, check: Callable[[], None]) -> bool:
        """Save this worker's shard under the history and the generation that have made it.

        So it is the same shard, byte for byte, whoever else has saved that one.
        """
        self.abandon()
        for is_last in (False, True):
            self._client.await_daemon(DAEMON_START_S, check)
            try:
                self._save_part(step, check)
                break
            except (TieredError, RuntimeError) as error:
                # A daemon that has ended meanwhile is started again.
                if is_last or not isinstance(error, LostError):
                    raise CheckpointError(f"no checkpoint of step {step}: {error}") from error
        return True

    def _save_part(self, step: int, check: Callable[[], None]) -> None:
        saving = None
        try:
            saving = self._saver.start(
                self._view, step=step, generation=self._generation, is_stable=False
            )
            if not saving.wait_copied(stall_s=self._subject.stall_s, pulse=check):
                raise CheckpointError("the daemon or the copy stood still")
            check()
            saving.commit()
            saving.wait_over(COMMIT_TIMEOUT_S, check=check)
            saving.wait(0.0)
            if self._store_tier:
                self._client.flush(step=step, generation=self._generation)
        finally:
            if saving is not None:
                saving.abandon()

    @property
    def _generation(self) -> int:
        """Return the generation that made the state, as this history counts them."""
        progress = self._subject.progress
        return int(progress.rest.get(HISTORY, 0)) + progress.step_generation

    @property
    def is_unstored(self) -> bool:
        """Return whether this worker's part of the last state was lost to a store that requires it.

        What a daemon that has it does not bring there, it knows itself.
        """
        is_required = self._store_tier is not None and self._store_tier.required
        return is_required and self._subject.placement.writes_shard and not self._is_handed_over

    def wait_stored(self, step: int, limit_s: float) -> str | None:
        """Return when the store has the step, or why it has not: this node's daemon brings it."""
        if not self._subject.placement.writes_shard:
            return None
        if not self._is_handed_over:
            return "this node's daemon has not got it"
        end_s = self._clock() + limit_s
        while (problem := self._find_unstored(step)) and self._clock() < end_s:
            # Nothing tells of a store that has taken something.
            time.sleep(_STORED_PAUSE_S)
        return problem

    def _find_unstored(self, step: int) -> str | None:
        """Return why the store has not got the newest state of a step, None where it has."""
        try:
            found = self._client.status()
        except TieredError as error:
            return str(error)
        key = step, self._generation
        for each in found["jobs"].get(self._client.namespace, {"steps": []})["steps"]:
            if (each["step"], each["generation"]) == key and each["store"] == each["num_shards"]:
                return None
        store = found["store"]
        return f"{store['name']}: {store['last_error'] or 'it has not taken it yet'}"

    def _flush(self, step: int, generation: int) -> bool:
        """Have this node's daemon send a step to the store; returns whether it has said so."""
        try:
            self._client.flush(step=step, generation=generation)
        except TieredError as error:
            self._fail(step, f"the store may not get it: {error}")
            return False
        return True

    def _fail(self, step: int, reason: str, *, is_said: bool = True) -> None:
        """Tell it, and a person of the first one."""
        if is_said and not self._has_warned:
            self._events.write("warning", text=f"no checkpoint of step {step}: {reason}")
        super()._fail(step, reason, is_said=is_said)

    def close(self) -> None:
        """End the connection to the daemon."""
        self._client.close()

    def _start(self, step: int) -> None:
        began_s = self._last_s = self._clock()
        if not self._subject.placement.writes_shard:
            return
        if self._under_way is not None and not self._await_end(self._under_way):
            self._fail(step, f"the save of step {self._under_way.saving.step} has not ended")
            return
        try:
            saving = self._saver.start(
                self._view, step=step, generation=self._generation, is_stable=False
            )
        except (ResilienceError, RuntimeError) as error:
            self._fail(step, str(error))
            return
        self._under_way = _UnderWay(saving, blocked_s=self._clock() - began_s)
        if self._is_inline:
            self._await_copy(self._under_way)

    def _await_copy(self, under_way: _UnderWay) -> None:
        began_s, stall_s = self._clock(), self._subject.stall_s
        try:
            if not under_way.saving.wait_copied(stall_s=stall_s, pulse=self._subject.pulse):
                under_way.is_settled = True
                step = under_way.saving.step
                self._fail(step, f"the daemon or the copy stood still for {stall_s:g} s")
        finally:
            under_way.blocked_s += self._clock() - began_s

    def _await_end(self, under_way: _UnderWay) -> bool:
        """Return whether a save is over, waiting for one that was just given up."""
        under_way.saving.wait_over(self._subject.stall_s, check=self._subject.group.check)
        self._settle()
        return self._under_way is None

    def _settle(self, *, is_final: bool = False) -> None:
        """Tell what came of a save that is over."""
        under_way = self._under_way
        if under_way is None or not (under_way.saving.is_over or is_final):
            return
        self._under_way = None
        step = under_way.saving.step
        try:
            saved = under_way.saving.wait(0.0)
        except AbandonedError:
            return
        except Exception as error:  # noqa: BLE001 - whatever a copy raises, the run goes on
            self._fail(step, str(error) or repr(error))
            return
        self._tell_saved(
            step, num_bytes=saved.num_bytes, seconds=saved.seconds, blocked_s=under_way.blocked_s
        )
        self._tell_domains()

    def _tell_domains(self) -> None:
        """Tell of each other number of failure domains, and a person where that is too few."""
        num, wanted = self._client.num_domains, self._domains_min
        for each in [*self._client.nameless] if self._is_leader else ():
            if each not in self._nameless:
                self._nameless.add(each)
                self._tell_warning(f"memoryd cannot reach {each}: {NO_NAME}")
        if not self._is_leader or num is None or num == self._num_domains:
            return
        self._num_domains = num
        self._events.write("failure_domains", num=num, wanted=wanted)
        if num < wanted:
            self._tell_warning(
                f"checkpoints in memory are in {num} of {wanted} failure domains "
                "(resilience.tiered.ram.domains_min): the nodes that are there share them"
            )

    # ---- loading

    def begin_run(self, step: int) -> None:
        """Begin a history whose generations are above those of all before."""
        own = self._go_back(step, None) if self._is_leader else 0
        told = int(self._subject.group.first_text("tiers/history", str(own), CHECKPOINT_TIMEOUT))
        if not self._is_leader:
            self._go_back(step, told)
        self._subject.progress.rest[HISTORY] = told
        self._prepare()
        super().begin_run(step)

    def _prepare(self) -> None:
        """Have memory made for the saves to come while training begins: gigabytes take seconds."""
        if self._subject.placement.writes_shard:
            _, num_bytes = place_tensors(self._view.tensors())
            arguments = (self._client.twin(), num_bytes)
            Thread(target=_prepare_memory, args=arguments, name="prepare", daemon=True).start()

    def _go_back(self, step: int, number: int | None) -> int:
        """Tell this node's daemon; returns what the generations of the history count from."""
        try:
            return self._client.go_back(
                step=step, first_generation=number, check=self._subject.group.check
            )
        except TieredError as error:
            self._fail(step, str(error))
            # As the daemon would have chosen, of what is known here.
            return number or max(int(time.time()), self._newest + 1)

    def load_newest(self, *, newer_than: int | None = None) -> Begun | None:
        """Load the newest step that every worker can have.

        Raises CheckpointError where it cannot be known which steps there are, and where none
        of those on offer could be loaded: to begin without would give up what is there.
        """
        self._refused.clear()
        own_namespace(self._client, self._subject.group, self._claim)
        loader = TierLoader(self._client, self._view, self._subject.group, self._refuse)
        loaded = loader.load_newest(newer_than=newer_than)
        self._newest = loader.newest_generation
        self._tell_domains()
        if loaded is None and newer_than is None and (text := os.environ.get(BRANCH_VARIABLE)):
            return self._load_branch(BranchPoint.model_validate_json(text))
        if loaded is None:
            if newer_than is None and os.environ.get(GOES_ON_VARIABLE) == "1":
                raise CheckpointError(
                    "the run was to go on from a checkpoint, and no tier has one in the namespace "
                    f"{self._client.namespace!r}; if its folder was moved, move it back: the "
                    "namespace follows from the name; to begin at step 0, start its recipe again "
                    "in a folder of its own with resilience.tiered.namespace=NAME"
                )
            return None
        self._loaded = loaded.step, loaded.generation
        return self._tell_begun(loaded, loader)

    def _load_branch(self, point: BranchPoint) -> Begun:
        """Load a state of another run, from its store: this one has none of its own yet."""
        # Nobody else reads a store without the daemon.
        from resilience.tiered.stores.choice import open_as
        from resilience.tiered.stores.reader import StoreReader

        own = self._store_tier
        assert own is not None
        # Records of before do not say how the store is reached: then it is as this run's is.
        place = point.model_dump(include={"endpoint", "region", "path_style"}, exclude_unset=True)
        store = open_as(point.url, own.model_copy(update=place))
        reader = StoreReader(store, point.namespace, source=BRANCH_SOURCE)
        group, where = self._subject.group, f"step {point.step} of {point.run}"
        loader = TierLoader(
            reader, self._view, group, self._refuse, topic="branch",
            advice="mend that and start the run again, or branch from another step",
        )  # fmt: skip
        loaded = loader.load_newest(newer_than=None, only=point.step)
        if loaded is None:
            raise CheckpointError(
                f"the run was to begin with {where}, and the namespace {point.namespace!r} in "
                f"{point.url} has no whole step {point.step}; branch from another one"
            )
        return self._tell_begun(loaded, loader)

    def _tell_begun(self, loaded: Loaded, loader: TierLoader) -> Begun:
        if loaded.step > self._max_steps:
            raise CheckpointError(
                f"the newest checkpoint is of step {loaded.step}, beyond trainer.max_steps "
                f"{self._max_steps}: set that to at least {loaded.step}"
            )
        source = "+".join(
            each if each.startswith("peer:") else each.partition(":")[0]
            for each in loaded.source.split("+")
        )
        return self._tell_loaded(
            loaded.step,
            source=source,
            num_bytes=loaded.num_bytes,
            seconds=loader.load_s,
            num_bad=loaded.num_bad,
        )
