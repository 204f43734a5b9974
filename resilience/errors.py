"""Errors of the resilience package.

ResilienceError
|-- FaultError          the generation has to end; the block is run again
|   |-- PlannedError    all ranks leave it after the same step: nothing failed
|   |-- BrokenError     another rank's fault, or the agent's word, ended it
|   |-- TransferError   state that arrived is not the state that was sent
|   |-- CorruptionError this rank's own state is not what its last update left
|   `-- GroupOpenError  the members of a generation did not meet in time
|-- StateError          a state that cannot be kept in replicas; says what to change
|-- StateLostError      no rank holds a whole state, and the program has made none; ends the run
`-- DeviceLostError     what this process holds on its device is gone; it has to be replaced
"""

from __future__ import annotations


class ResilienceError(Exception):
    """Root of the package's errors."""


class FaultError(ResilienceError):
    """The generation has to end; the block is run again under the next one."""


class PlannedError(FaultError):
    """All ranks leave the generation after the same step, as they were asked to: nothing failed."""


class BrokenError(FaultError):
    """The generation was ended from outside: a peer's fault, or the agent's word."""


class TransferError(FaultError):
    """State arrived with another checksum than it was sent with, or not whole."""


class CorruptionError(FaultError):
    """This rank's state has changed since its last update ended."""


class GroupOpenError(FaultError):
    """The members of a generation did not meet in time."""


class StateError(ResilienceError):
    """The state cannot be kept in replicas; the message says what to change."""


class PlacesDifferError(StateError):
    """Ranks have come to one gate from different places of their program."""


class StateLostError(ResilienceError):
    """No rank holds a whole state, and `start` has neither made nor loaded one."""


class DeviceLostError(ResilienceError):
    """What this process holds on its device is gone, and its context takes no more work."""
