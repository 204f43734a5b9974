"""Weights without training: python -m recipes_training.convert SOURCE TARGET [options].

SOURCE is a folder of weights that are packed as MXFP4, as GPT-OSS is published, or the folder of a
run, whose newest checkpoint is read from its store. TARGET becomes a folder of plain weights in
Hugging Face's layout.

Exit status 0; 1 where something outside fails, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.job import JobFileError
from recipes_training.errors import ConversionError, TrainingError
from resilience.arguments import Parser, read_as
from resilience.settings import Whole

if TYPE_CHECKING:
    from recipes_training.convert.output import Output

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert what the command line names; returns the exit status."""
    given = _parse(arguments)
    try:
        (output := _plan(given)).write(given.target)
    except (TrainingError, JobFileError) as error:
        print(f"recipes_training.convert: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_status
    size = f"{len(output.shapes)} tensors of {output.dtype}, {output.num_bytes:,} bytes"
    print(f"{given.target}: {size}")  # noqa: T201
    return 0


def _plan(given: argparse.Namespace) -> Output:
    """Return what is to be written; refuses the arguments before torch is imported."""
    if given.target.exists() or given.target.is_symlink():
        raise ConversionError(f"TARGET {given.target} exists; name a folder that does not")
    if not given.source.is_dir():
        raise ConversionError(f"SOURCE {given.source} is no folder")
    is_run = (given.source / "job.json").exists()
    if not is_run and not (given.source / "config.json").exists():
        raise ConversionError(
            f"SOURCE {given.source} has neither a config.json, as weights have, nor a job.json, as "
            "runs have"
        )
    if given.step is not None and not is_run:
        raise ConversionError(f"--step is of a run, and SOURCE {given.source} is none")
    import torch

    dtype = getattr(torch, _DTYPES[given.dtype]) if given.dtype else None
    if is_run:
        from recipes_training.convert.stored import plan_stored

        return plan_stored(given.source, dtype, given.step)
    from recipes_training.convert.expanding import plan_expansion

    return plan_expansion(given.source, dtype)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m recipes_training.convert",
        description="Convert weights without training.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="weights that are packed as MXFP4, or a run"
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder to write, a new one")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="type of the values")
    parser.add_argument(
        "--step", type=read_as(Whole), metavar="N", help="step of the run (default: the newest)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):
        # What is half-written goes.
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
