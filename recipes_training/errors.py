"""Errors that a person can do something about.

TrainingError
|-- PlacementError   the worker was not started as its job says
|-- DataError        the data or its tokenizer is missing, broken or does not fit
|-- WeightsError     the weights to start from do not fit the model
|-- GroupError       the workers did not find each other in time
|-- CheckpointError  a checkpoint could not be written, or not be read again
|-- OwnedError       the checkpoints' namespace is another run's (status 2)
|-- ConversionError  weights that were named cannot be converted, or not to there (status 2)
`-- DivergedError    a step is not finite, and would not be when it is run again

Each ends the worker with one line on stderr and status 1, unless it says another; everything else
is a bug and keeps its traceback.
"""

from __future__ import annotations


class TrainingError(Exception):
    """Root of the errors that end a worker without a traceback."""

    exit_status = 1


class PlacementError(TrainingError):
    """The worker's environment or machine is not what the job asks for."""


class DataError(TrainingError):
    """The data cannot be read, or does not fit the model or the batch."""


class WeightsError(TrainingError):
    """The folder of weights cannot be read, or does not fit the model."""


class GroupError(TrainingError):
    """The workers did not find each other, or one of them gave up."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, and an older one is still there; or it cannot be read."""


class OwnedError(TrainingError):
    """The namespace belongs to another run, and nobody has said what to do about that."""

    exit_status = 2


class ConversionError(TrainingError):
    """What is to be converted is not there or needs no conversion, or its target exists."""

    exit_status = 2


class DivergedError(TrainingError):
    """The loss or the gradients are not finite; nothing has been written of the step."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def describe(error: BaseException) -> str:
    """Return an error as another worker is told it: with its type where it may be a bug."""
    if isinstance(error, TrainingError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"
