"""What the launcher raises, by what its caller does about it.

LauncherError
+-- RecipeError    the person's input is wrong: one message, exit status 2
+-- OutsideError   a cluster, program or file failed: its own words, exit status 1
"""

from __future__ import annotations


class LauncherError(Exception):
    """Root of the launcher's errors; `exit_status` is what the command ends with."""

    exit_status = 1


class RecipeError(LauncherError):
    """The recipe, an override or the command line cannot be used."""

    exit_status = 2


class OutsideError(LauncherError):
    """Something outside the launcher refused or is missing."""


def system_failure(error: OSError) -> OutsideError:
    """Return what to raise for a file, folder or disk that failed, in the system's own words."""
    return OutsideError(f"{error.filename or 'output'}: {error.strerror or error}")
