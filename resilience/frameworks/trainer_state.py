"""State of a transformers.Trainer that its loop changes, beside model, optimizer and scheduler."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from resilience.frameworks.plain_values import read_values, write_values

_OF_RANK = ("is_local_process_zero", "is_world_process_zero", "log_history")
"""Fields of TrainerState that say which rank it is of, or that are sent as text."""
_SHARED = ("global_step", "epoch", "num_input_tokens_seen", "best_global_step")
"""Fields that are the same on all ranks."""
_APART = frozenset({"_tr_loss", "current_flos", "is_in_train"})
"""Attributes of a Trainer that are each rank's own, or no state."""


class TrainerProgress:
    """What a Trainer counts and logs, for a step that is run again and for a process that joins.

    The sum of losses and the number of operations since the last log are each rank's own. `share`
    brings them to all ranks in each step, so that a process that takes a lost rank's place gets
    that rank's.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rank = trainer.args.process_index
        self._rows = torch.zeros(trainer.args.world_size, 2, dtype=torch.float64)
        self._history: tuple[int, str] = (0, "[]")
        self._callbacks: list[dict[str, Any]] | None = None
        """Values of callbacks at the begin of a step that is run again."""
        self.log: dict[str, Any] = {}
        """Gradient norm and learning rate of the last step, which its log has."""
        self.start_s = time.time()

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._callbacks = None

    def note_step(self, **values: Any) -> None:
        """Note what the step's log has beside the loss."""
        self.log = values

    def share(self) -> None:
        """Bring each rank's own sums to all ranks."""
        self._rows = torch.zeros_like(self._rows)
        self._rows[self._rank] = torch.tensor(self._read_own(), dtype=torch.float64)
        if len(self._rows) > 1:
            dist.all_reduce(self._rows)

    def shared(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""
        state = [getattr(self._trainer.state, each) for each in _SHARED]
        return {"state": state, "control": vars(self._trainer.control)}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it: numbers, text and tensors."""
        trainer = self._trainer
        state = {key: each for key, each in vars(trainer.state).items() if key not in _OF_RANK}
        return {
            "rank": self._rank,
            "state": json.dumps(state, default=float),
            "control": dict(vars(trainer.control)),
            "history": self._write_history(),
            "own": self._read_own(),
            "rows": self._rows.clone(),
            "attributes": read_values(trainer, without=_APART),
            "callbacks": self._callbacks or [read_values(each) for each in _callbacks(trainer)],
            "log": dict(self.log),
            "start_s": self.start_s,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over this rank's own state of before, or another rank's."""
        trainer, is_own = self._trainer, state_dict["rank"] == self._rank
        vars(trainer.state).update(json.loads(state_dict["state"]))
        trainer.state.log_history = json.loads(state_dict["history"])
        vars(trainer.control).update(state_dict["control"])
        write_values(trainer, state_dict["attributes"])
        self._rows = state_dict["rows"].clone()
        self._callbacks = state_dict["callbacks"]
        if not is_own:
            # Its own have not been called yet; where this rank stays, each is called once.
            for each, values in zip(_callbacks(trainer), state_dict["callbacks"], strict=True):
                write_values(each, values)
        own = [
            # A log sets a sum to 0 on all ranks.
            mine if is_own or given == theirs else 0.0
            for mine, given, theirs in zip(
                state_dict["own"] if is_own else self._rows[self._rank].tolist(),
                state_dict["own"],
                self._rows[state_dict["rank"]].tolist(),
                strict=True,
            )
        ]
        trainer._tr_loss.fill_(own[0])  # noqa: SLF001
        trainer.current_flos = own[1]
        self.log, self.start_s = dict(state_dict["log"]), state_dict["start_s"]

    def _read_own(self) -> list[float]:
        return [float(self._trainer._tr_loss), float(self._trainer.current_flos)]  # noqa: SLF001

    def _write_history(self) -> str:
        """Return the log's lines as text, written anew where there are more or fewer."""
        lines = self._trainer.state.log_history
        if self._history[0] != len(lines):
            self._history = (len(lines), json.dumps(lines, default=float))
        return self._history[1]


def _callbacks(trainer: Any) -> list[Any]:
    found: list[Any] = trainer.callback_handler.callbacks
    return found
