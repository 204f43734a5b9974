"""Progress in a TrainJob's status, where the controller of Kubeflow's Trainer takes it.

The controller gives each pod an address, a certificate and a token of its own (gate TrainJobStatus
of Trainer 2.2 and later). The agent of rank 0 tells it the newest step, at most once in 5 s, and
the last one at the end. Progress that cannot be told is warned of once; the run goes on.
"""

from __future__ import annotations

import json
import ssl
import threading
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from http.client import HTTPException
from pathlib import Path
from typing import Any

from resilience.events import Event, parse_line

_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
_PAUSE_S = 5.0
_TIMEOUT_S = 5.0
_METRICS = ("loss", "lr", "grad_norm")
_VALUE_MAX, _SECONDS_MAX = 64, 2**31 - 1
"""Limits of the fields in TrainJob's schema."""
_NUM_PACES = 20
"""Newest step events whose mean duration gives the remaining time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusServer:
    """Server that takes the progress of a pod's TrainJob."""

    url: str
    certificate: Path
    """Of the authority, PEM. Both files change while the run goes on."""
    token: Path

    def post(self, status: Mapping[str, Any]) -> None:
        """Send a status; raises OSError or HTTPException where it is not taken."""
        words = {
            "Authorization": f"Bearer {self.token.read_text().strip()}",
            "Content-Type": "application/json",
        }
        body = json.dumps({"trainerStatus": status}).encode()
        request = urllib.request.Request(self.url, body, words)
        context = ssl.create_default_context(cafile=str(self.certificate))
        # The controller is within the cluster, where no proxy of the environment is asked.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        opener.open(request, timeout=_TIMEOUT_S).close()


def take_server(variables: MutableMapping[str, str]) -> StatusServer | None:
    """Take the server out of the environment, so that no worker tells it something else.

    Transformers' Trainer does where it finds these variables.
    """
    found = [variables.pop(name, "") for name in (_URL, _CERTIFICATE, _TOKEN)]
    if not all(found) or not found[0].startswith("https://"):
        return None
    return StatusServer(url=found[0], certificate=Path(found[1]), token=Path(found[2]))


class TrainJobProgress:
    """Progress of a run, from its step events. Pure."""

    def __init__(self, num_steps: int) -> None:
        """`num_steps` are those of the whole run, 0 where no number is known."""
        self._num_steps = num_steps
        self._paces: deque[float] = deque(maxlen=_NUM_PACES)

    def describe(self, event: Event) -> dict[str, Any]:
        """Return the fields of TrainJob's status.trainerStatus after a step event."""
        num_done = max(0, event.step or 0) + 1
        pace = event.fields.get("duration_s")
        if isinstance(pace, (int, float)):
            self._paces.append(max(0.0, pace))
        values = {"step": num_done} | {name: event.fields.get(name) for name in _METRICS}
        told: dict[str, Any] = {
            "metrics": [
                {"name": name, "value": str(value)[:_VALUE_MAX]}
                for name, value in values.items()
                if value not in (None, "")
            ],
            "lastUpdatedTime": datetime.fromtimestamp(event.time, timezone.utc).isoformat(),
        }
        if self._num_steps:
            told["progressPercentage"] = min(100, 100 * num_done // self._num_steps)
            num_left = max(0, self._num_steps - num_done)
            if self._paces:
                pace = sum(self._paces) / len(self._paces)
                told["estimatedRemainingSeconds"] = min(round(num_left * pace), _SECONDS_MAX)
        return told


class ProgressTeller:
    """Tells a status server the newest step; who writes events never waits for it."""

    def __init__(
        self, server: StatusServer, num_steps: int, complain: Callable[[str], None]
    ) -> None:
        self._server, self._complain = server, complain
        self._progress = TrainJobProgress(num_steps)
        self._status: dict[str, Any] | None = None
        """Status that is to be told next."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = self._has_complained = False

    def note(self, line: bytes) -> None:
        """Look at a line of the run's events."""
        event = None
        if b'"event":"step"' in line:
            # A program may write what is no event.
            with suppress(ValueError):
                event = parse_line(line)
        if event is None:
            return
        with self._changed:
            self._status = self._progress.describe(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Tell the last step, within this time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join(timeout_s)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._status or self._is_closing)
                status, self._status = self._status, None
                if status is None:
                    return
            try:
                self._server.post(status)
            except (OSError, ValueError, HTTPException) as error:
                if not self._has_complained:
                    self._has_complained = True
                    self._complain(f"cannot tell Kubeflow's controller of progress: {error}")
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, _PAUSE_S)
