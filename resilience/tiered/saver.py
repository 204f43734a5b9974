"""Puts the state of a rank into its node's memory, while the device computes or in line.

A shard is copied into a draft, and visible from its commit on. Who saves a step that is
not stable yet decides later: `Saving.commit`, or `Saving.abandon` as if it had never been.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from resilience.state.view import NamedTensor, StateView
from resilience.tiered.attempts import check_begun, judge_held
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import HeldError, LostError, TieredError
from resilience.tiered.packing import describe_shard, hash_tensors, pack
from resilience.tiered.shard import ShardId, ShardMeta, content_digest

VERDICT_TIMEOUT_S = 3600.0
"""How long a copied draft waits for the decision about it."""

_PULSE_S = 0.05


class AbandonedError(TieredError):
    """The save was given up before it was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What came of a save."""

    step: int
    num_bytes: int
    seconds: float
    """From the begin until the daemon had it."""


class Saving:
    """A save under way. Its tensors must not change until the copy has ended.

    The methods are for the training thread, but for those of the copying one at the end.
    `made_bytes` tells how much memory there is: what gets on before the copy has any.
    """

    def __init__(
        self, step: int, *, is_stable: bool = True, made_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self.step = step
        self._made_bytes = made_bytes
        self._changed = threading.Condition()
        self._verdict = True if is_stable else None
        self._num_bytes: int | None = None
        """How many are copied; None before there is memory for them."""
        self._is_copied = False
        self._is_over = False
        self._saved: Saved | None = None
        self._error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._is_over

    def commit(self) -> None:
        """Let the shard become visible as soon as it is copied; does not block."""
        self._decide(is_kept=True)

    def abandon(self) -> None:
        """Let it never have been; a no-op after `commit`. Does not block.

        The copying thread reads no tensor any more after the piece that it is at.
        """
        self._decide(is_kept=False)

    def wait(self, timeout_s: float | None = None) -> Saved:
        """Block until the shard is in the node's memory; raises what went wrong.

        TieredError: the step has no checkpoint here, and the run can go on; AbandonedError
        where that was wanted. LostError after the time-out: the copy still goes on, so the
        tensors must not change yet.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over, timeout_s):
                raise LostError(f"the copy has not ended within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def wait_over(self, timeout_s: float, *, check: Callable[[], None] | None = None) -> bool:
        """Return whether it is over, whatever came of it, within a time.

        `check` is called every now and then, and may raise to end the wait.
        """
        end_s = time.monotonic() + timeout_s
        while not self._is_over:
            if check is not None:
                check()
            if (rest_s := end_s - time.monotonic()) <= 0:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, min(rest_s, _PULSE_S))
        return True

    def wait_copied(self, *, stall_s: float, pulse: Callable[[], None]) -> bool:
        """Block until the tensors may change, calling `pulse` while the copy gets on.

        So it does while memory for it is being made. False where it did not get on for `stall_s`:
        it is abandoned then. Raises nothing but what `pulse` raises.
        """
        seen, since_s = None, time.monotonic()
        while not (self._is_copied or self._is_over):
            now = (self._num_bytes, self._made_bytes() if self._num_bytes is None else 0)
            if seen != now:
                seen, since_s = now, time.monotonic()
                pulse()
            elif time.monotonic() - since_s >= stall_s:
                self.abandon()
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._is_copied or self._is_over, _PULSE_S)
        return True

    def note_bytes(self, num_bytes: int) -> None:
        """For the copying thread: so many bytes are there. Raises AbandonedError to end it."""
        self._num_bytes = num_bytes
        if self._verdict is False:
            raise AbandonedError(f"the save of step {self.step} was given up")

    def await_verdict(self) -> None:
        """For the copying thread: the copy has ended; returns if it is to be committed."""
        with self._changed:
            self._is_copied = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._verdict is not None, VERDICT_TIMEOUT_S)
        if not self._verdict:
            raise AbandonedError(f"the save of step {self.step} was given up")

    def end(self, saved: Saved | None, error: Exception | None) -> None:
        """For the copying thread: let those go on who wait."""
        with self._changed:
            self._saved, self._error, self._is_over = saved, error, True
            self._changed.notify_all()

    def _decide(self, *, is_kept: bool) -> None:
        with self._changed:
            if self._verdict is None:
                self._verdict = is_kept
                self._changed.notify_all()


class Saver:
    """Saves one rank's shard; `num_shards` is how many make a step whole.

    Each rank's node has to know where the run begins before the first save: `client.go_back`.
    With `has_begun` the caller has seen to that, and the daemon is not asked.
    `volatile` names tensors that a forward may write, such as running statistics: they are
    copied before `start` returns. All others may change in an update alone.
    """

    def __init__(
        self,
        client: TieredClient,
        *,
        num_shards: int,
        volatile: Collection[str] = (),
        has_begun: bool = False,
    ) -> None:
        self._client = client
        self._num_shards = num_shards
        self._volatile = frozenset(volatile)
        self._has_begun = has_begun

    def save(self, view: StateView, *, step: int, generation: int) -> Saved:
        """Copy the state; returns when it is in the node's memory.

        Raises VaultFullError where there is no room, StaleError where a newer generation
        has written this step or a later one, or the run has not said where it begins, HeldError
        where the node has this shard with other content, LostError where the daemon is gone:
        all TieredErrors, after which the run can go on.
        """
        return self._save(self._plan(view, step, generation), Saving(step))

    def start(
        self, view: StateView, *, step: int, generation: int, is_stable: bool = True
    ) -> Saving:
        """Copy the state in a thread; wait for the copy before the next update writes.

        Worth it where the device computes meanwhile. On busy cores `save` is as fast. A step
        that is not stable yet becomes visible by `Saving.commit` alone.
        """
        plan = self._plan(view, step, generation, is_copied=True)
        saving = Saving(step, is_stable=is_stable, made_bytes=self._client.made_bytes)
        thread = threading.Thread(
            target=self._run, args=(plan, saving), name=f"save-{step}", daemon=True
        )
        thread.start()
        return saving

    def _plan(
        self, view: StateView, step: int, generation: int, *, is_copied: bool = False
    ) -> _Plan:
        tensors = view.tensors()
        if is_copied:
            tensors = [self._keep(each) for each in tensors]
        shard_id = ShardId(
            namespace=self._client.namespace,
            step=step,
            generation=generation,
            shard=view.shard or "0",
        )
        rest = dict(view.read_rest())
        meta = describe_shard(shard_id, tensors, num_shards=self._num_shards, rest=rest)
        return _Plan(meta=meta, tensors=tensors, written=_note_writes(tensors))

    def _keep(self, each: NamedTensor) -> NamedTensor:
        if each.name not in self._volatile:
            return each
        return replace(each, tensor=each.tensor.detach().clone())

    def _run(self, plan: _Plan, saving: Saving) -> None:
        try:
            with _after_writes(plan.written):
                saved = self._save(plan, saving)
        except Exception as error:  # noqa: BLE001 - raised where somebody waits
            saving.end(None, error)
        else:
            saving.end(saved, None)

    def _save(self, plan: _Plan, saving: Saving) -> Saved:
        began_s = time.monotonic()
        self._check_begun(plan.meta.id)
        try:
            write_shard(self._client, plan.meta, plan.tensors, saving)
        except HeldError:
            self._compare(plan, saving)
        return Saved(
            step=plan.meta.id.step,
            num_bytes=plan.meta.num_bytes,
            seconds=time.monotonic() - began_s,
        )

    def _check_begun(self, shard_id: ShardId) -> None:
        """Ask the daemon once: it may forget the run, where it loses its memory, later."""
        if not self._has_begun:
            check_begun(self._client.newest_run(), shard_id.step, shard_id.generation)
            self._has_begun = True

    def _compare(self, plan: _Plan, saving: Saving) -> None:
        """Return when this node has the shard as this rank would have written it.

        Raises HeldError where its content is another, and LostError where the replica that
        wrote it has given up.
        """
        checksums = hash_tensors(plan.tensors, plan.meta.num_bytes, on_piece=saving.note_bytes)
        digest = content_digest(replace(plan.meta, checksums=checksums))
        saving.await_verdict()
        shard_id = plan.meta.id
        end_s = time.monotonic() + VERDICT_TIMEOUT_S
        while True:
            held = self._client.find(
                step=shard_id.step, generation=shard_id.generation, shard=shard_id.shard
            )
            judgement = judge_held(held, digest)
            if judgement == "same":
                return
            if judgement == "gone" or time.monotonic() >= end_s:
                raise LostError(
                    f"the replica that wrote shard {shard_id.shard} of step {shard_id.step} "
                    "has given up"
                )
            time.sleep(_PULSE_S)


def write_shard(
    client: TieredClient, meta: ShardMeta, tensors: Sequence[NamedTensor], saving: Saving
) -> None:
    """Copy tensors into the node's memory; the shard that `meta` describes is visible then.

    Raises as `Saver.save` does, HeldError where the shard is there or is being written, and
    AbandonedError where the saving was given up meanwhile.
    """
    shard_id = meta.id
    with client.begin(
        step=shard_id.step,
        generation=shard_id.generation,
        shard=shard_id.shard,
        num_shards=meta.num_shards,
        num_bytes=meta.num_bytes,
    ) as draft:
        saving.note_bytes(0)
        memory = np.frombuffer(draft.memory, dtype=np.uint8)
        checksums = pack(tensors, memory, on_piece=saving.note_bytes)
        saving.await_verdict()
        draft.commit(replace(meta, checksums=checksums))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """All that a save needs of the view, read by the thread that owns it."""

    meta: ShardMeta
    tensors: Sequence[NamedTensor]
    written: Sequence[_Written]


_Written = tuple[torch.device, torch.cuda.Event]
"""A device, and the moment at which all that it was asked for until now is done."""


def _note_writes(tensors: Sequence[NamedTensor]) -> list[_Written]:
    """Note, on each device, where what was queued until now ends: the last update above all."""
    devices = {each.tensor.device for each in tensors if each.tensor.device.type == "cuda"}
    noted = []
    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        noted.append((device, event))
    return noted


@contextmanager
def _after_writes(written: Sequence[_Written]) -> Iterator[None]:
    """Let this thread copy beside the kernels queued meanwhile, and after those noted.

    On the device's current stream a copy would wait for the forward that was queued before it.
    The block's copies end before it does: they go to memory that is not pinned.
    """
    with ExitStack() as stack:
        for device, event in written:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            stack.enter_context(torch.cuda.stream(stream))
        yield
