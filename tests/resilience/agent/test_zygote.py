"""How the process that forks workers runs a program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resilience.agent.processes.zygote import run_program


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_program_finds_what_the_interpreter_would_give_it(
    is_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments, its name, and the modules beside it."""
    (tmp_path / "beside_it.py").write_text("value = 3\n")
    (tmp_path / "own_program.py").write_text(
        "import sys, pathlib, beside_it\n"
        "pathlib.Path('out').write_text(f'{__name__} {sys.argv[1:]} {beside_it.value}')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["-m", "own_program"] if is_module else [str(tmp_path / "own_program.py")]

    run_program([*command, "--steps", "3"])

    assert (tmp_path / "out").read_text() == "__main__ ['--steps', '3'] 3"
    sys.modules.pop("beside_it", None)


@pytest.mark.filterwarnings("default")
def test_missing_module_is_the_programs_error() -> None:
    with pytest.raises(ImportError, match="no_such_program"):
        run_program(["-m", "no_such_program"])
