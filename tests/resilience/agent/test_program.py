"""What tells nodes apart that would run something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from resilience.agent.program import describe_program
from resilience.node_config import RunConfig


def config(digest: str) -> RunConfig:
    return RunConfig(recipe="a/b", version=1, digest=digest)


def test_job_code_and_torch_are_told(tmp_path: Path) -> None:
    (tmp_path / "recipes_training").mkdir()
    told = describe_program(config("a" * 64), tmp_path)
    assert describe_program(config("a" * 64), tmp_path) == told
    assert describe_program(config("b" * 64), tmp_path) != told
    assert told.startswith("job aaaaaaaaaaaa, code ")

    (tmp_path / "recipes_training" / "one.py").write_text("")
    one = describe_program(config("a" * 64), tmp_path)
    (tmp_path / "recipes_training" / "one.py").rename(tmp_path / "recipes_training" / "two.py")
    two = describe_program(config("a" * 64), tmp_path)

    assert len({told, one, two}) == 3
    assert describe_program(None, tmp_path) == two.removeprefix("job aaaaaaaaaaaa, ")


def test_an_agent_needs_no_torch() -> None:
    code = "import resilience.agent.__main__, sys; print('torch' in sys.modules)"

    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert told.stdout == "False\n"
