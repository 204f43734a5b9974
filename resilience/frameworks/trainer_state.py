"""State of a transformers.Trainer that its loop changes, beside model, optimizer and scheduler."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from resilience.frameworks.plain_values import KeptValues, name_by_class

_SENT_APART = ("is_local_process_zero", "is_world_process_zero", "log_history")
"""Fields of TrainerState that belong to a process, and the log, which has a text of its own."""
_SHARED = ("global_step", "epoch", "num_input_tokens_seen", "best_global_step")
"""Fields that are the same on all ranks."""
_NOT_SENT = frozenset({"_tr_loss", "current_flos", "is_in_train", "train_dataset", "eval_dataset"})
"""Attributes of a Trainer that `own` has, that belong to a process, or that no step changes."""


class TrainerProgress:
    """Counts and log of a Trainer, for a step that is run again and for a process that joins.

    The sum of losses and the number of operations since the last log are each rank's own. `share`
    brings them to all ranks in each step, so that a process that takes a lost rank's place gets
    that rank's. Of the attributes of trainer and callbacks it gets those that have changed since
    this was made: others may be a rank's own.
    """

    gives_copies = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rank = trainer.args.process_index
        self._rows = torch.zeros(trainer.args.world_size, 2, dtype=torch.float64)
        self._rows_step = -1
        """The step in which they were brought to all ranks."""
        self._sharing: dist.Work | None = None
        self._history: tuple[int, str] = (0, "[]")
        self._before: dict[str, Any] | None = None
        """Changed values of callbacks at the begin of what is run again."""
        self._attributes = KeptValues(trainer, without=_NOT_SENT)
        self._callbacks: dict[str, KeptValues] = {}
        self._follow_callbacks()
        self.log: dict[str, Any] = {}
        """Gradient norm and learning rate of the last step, which its log has."""
        self.start_s = time.time()

    def begin_part(self) -> None:
        """Note that a step, or what follows one, begins."""
        self._before = None

    def note_step(self, **values: Any) -> None:
        """Note what the step's log has beside the loss."""
        self.log = values

    def begin_share(self) -> None:
        """Begin to bring each rank's own sums to all ranks, while the step goes on."""
        self._rows = torch.zeros_like(self._rows)
        self._rows[self._rank] = torch.tensor(self._read_own(), dtype=torch.float64)
        self._rows_step = self._trainer.state.global_step
        if len(self._rows) > 1:
            self._sharing = dist.all_reduce(self._rows, async_op=True)

    def share(self) -> None:
        """Return once all ranks have them."""
        if self._sharing is not None:
            self._sharing.wait()
            self._sharing = None

    def compared_state(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""
        state = [getattr(self._trainer.state, each) for each in _SHARED]
        return {"state": state, "control": vars(self._trainer.control)}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it: numbers, text and tensors."""
        trainer = self._trainer
        state = {key: each for key, each in vars(trainer.state).items() if key not in _SENT_APART}
        return {
            "rank": self._rank,
            "state": json.dumps(state, default=float),
            "control": dict(vars(trainer.control)),
            "history": self._write_history(),
            "own": self._read_own(),
            "rows": self._rows.clone(),
            "rows_step": self._rows_step,
            "attributes": self._attributes.read(),
            "callbacks": self._read_callbacks() if self._before is None else self._before,
            "log": dict(self.log),
            "start_s": self.start_s,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over this rank's own state of before, or another rank's."""
        trainer, is_own = self._trainer, state_dict["rank"] == self._rank
        vars(trainer.state).update(json.loads(state_dict["state"]))
        trainer.state.log_history = json.loads(state_dict["history"])
        vars(trainer.control).update(state_dict["control"])
        self._rows, self._rows_step = state_dict["rows"].clone(), state_dict["rows_step"]
        self._before = state_dict["callbacks"]
        own_sums = state_dict["own"]
        if is_own:
            # Callbacks keep what they have: each call is made once.
            self._attributes.restore(state_dict["attributes"])
        else:
            self._attributes.take_over(state_dict["attributes"])
            callbacks = self._follow_callbacks()
            for key in callbacks.keys() & state_dict["callbacks"].keys():
                callbacks[key].take_over(state_dict["callbacks"][key])
            own_sums = self._find_sums(own_sums, state_dict["rank"])
        trainer._tr_loss.fill_(own_sums[0])  # noqa: SLF001
        trainer.current_flos = own_sums[1]
        self.log, self.start_s = dict(state_dict["log"]), state_dict["start_s"]

    def _find_sums(self, of_sender: Sequence[float], sender: int) -> list[float]:
        """Return this rank's sums, given another's; a log or a save has set both to 0."""
        loss, flos = self._rows[self._rank].tolist()
        has_logged = self._trainer._globalstep_last_logged > self._rows_step  # noqa: SLF001
        has_stored = of_sender[1] != float(self._rows[sender, 1])
        return [0.0 if has_logged else loss, 0.0 if has_stored else flos]

    def _read_callbacks(self) -> dict[str, Any]:
        return {key: each.read_changed() for key, each in self._follow_callbacks().items()}

    def _follow_callbacks(self) -> dict[str, KeptValues]:
        """Return what is kept of each callback; a resume may put others in their places."""
        for key, each in name_by_class(self._trainer.callback_handler.callbacks).items():
            self._callbacks.setdefault(key, KeptValues(each)).follow(each)
        return self._callbacks

    def _read_own(self) -> list[float]:
        return [float(self._trainer._tr_loss), float(self._trainer.current_flos)]  # noqa: SLF001

    def _write_history(self) -> str:
        """Return the log's lines as text, written anew where there are more or fewer."""
        lines = self._trainer.state.log_history
        if self._history[0] != len(lines):
            self._history = (len(lines), json.dumps(lines, default=float))
        return self._history[1]
