"""What a node's workers run, in words that are the same on all nodes of a run."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from resilience.node_config import RunConfig

_PACKAGES = ("launcher", "resilience", "recipes_training")
_NUM_DIGITS = 12


def describe_program(run: RunConfig | None, root: Path = Path(__file__).parents[2]) -> str:
    """Return job, code and torch's version; no job where no launcher has rendered one.

    The code are the packages of this project that lie in the folder `root`.
    """
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    job = f"job {run.digest[:_NUM_DIGITS]}, " if run else ""
    return f"{job}code {_code_digest(root)[:_NUM_DIGITS]}, torch {torch}"


def _code_digest(root: Path) -> str:
    found = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).digest()
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + content)
    return found.hexdigest()
