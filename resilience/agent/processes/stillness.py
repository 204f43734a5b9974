"""Whether a program without a block gets on. Pure.

Of such a program steps are seen, where it tells any, and else what it prints and what it takes of
processors. It hangs where no rank of the node has shown a step for the deadline. A node none of
whose ranks tells steps hangs where all of them together have printed nothing and have taken less
than a hundredth of a core.
"""

from __future__ import annotations

from dataclasses import dataclass

_CORE_SHARE = 0.01
_LOOKS = 20
"""Within a deadline."""
_LOOK_S_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """State of a node's ranks at a moment."""

    step_s: float | None
    """When one of them told a step last; None where none has told any."""
    output_s: float
    """When one of them wrote something last."""
    processor_s: float
    """What they and all that they have started have taken of processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Still:
    """No rank of the node gets on."""

    text: str
    quiet_s: float


class Stillness:
    """Holds a node's ranks to a deadline, by one clock."""

    def __init__(self, deadline_s: float, pause_s: float) -> None:
        """Without a call of `note_time` for `pause_s` this process has stood still itself."""
        self._deadline_s, self._pause_s = deadline_s, pause_s
        self._generation = -1
        self._since_s = self._noted_s = 0.0
        self._step_s = self._output_s = self._processor_s = 0.0
        self.due_s = float("-inf")
        """When to look next."""

    def note_time(self, generation: int, now_s: float) -> None:
        """Note which generation the ranks are in now; another one begins its own deadline.

        Ranks may have stood still with this process: they get the time that they have missed.
        """
        gap_s, self._noted_s = now_s - self._noted_s, now_s
        if generation != self._generation:
            self._generation, self._since_s, self._step_s = generation, now_s, 0.0
        elif gap_s > self._pause_s:
            self._since_s += gap_s

    def look(self, seen: Observation, now_s: float) -> Still | None:
        """Return what is wrong where the deadline is over; it then begins anew."""
        self.due_s = now_s + min(_LOOK_S_MAX, self._deadline_s / _LOOKS)
        used_s = seen.processor_s - self._processor_s
        if seen.step_s is not None:
            if seen.step_s > self._step_s:
                self._step_s = seen.step_s
                self._since_s = max(self._since_s, seen.step_s)
        elif seen.output_s > self._output_s or used_s >= _CORE_SHARE * self._deadline_s:
            self._since_s, self._output_s = now_s, seen.output_s
            self._processor_s = seen.processor_s
        elif used_s < 0:  # a process that has ended takes along what it had
            self._processor_s = seen.processor_s
        quiet_s = now_s - self._since_s
        if quiet_s < self._deadline_s:
            return None
        self._since_s = now_s
        text = f"no step for {self._deadline_s:g} s"
        if seen.step_s is None:
            text = (
                f"no output and no processor time for {self._deadline_s:g} s; the program tells "
                "no steps"
            )
        return Still(text=text, quiet_s=quiet_s)
