"""The command that asks daemons."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from resilience.tiered.__main__ import main


def ask(*words: str | Path, **variables: str) -> tuple[int, str, str]:
    """Do what `python -m resilience.tiered` does, with variables beside the usual ones.

    Returns exit status and both outputs.
    """
    known = {name: text for name, text in os.environ.items() if not name.startswith("MEMORYD_")}
    output, errors = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, {**known, **variables}, clear=True),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        try:
            status = main([*map(str, words)])
        except SystemExit as end:
            status = int(end.code or 0)
    return status, output.getvalue(), errors.getvalue()
