"""How the process that forks workers runs a program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resilience.agent.processes.zygote import run_program
from tests.resilience.agent.runs import Run


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


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("sys.stdout.close(); sys.exit(3)", id="closed-output"),
        pytest.param("sys.stderr = None; sys.exit(3)", id="no-errors"),
        pytest.param("sys.stderr.close(); raise ValueError(3)", id="closed-errors"),
    ],
)
def test_program_that_has_closed_its_output_fails_as_it_does(words: str, run: Run) -> None:
    """No failure is a success for want of a place to say so."""
    program = run.folder / "program.py"
    program.write_text(f"import sys\n{words}\n")

    run.start("n0", "--nproc-per-node", "1", program=(str(program),))

    assert run.wait() == (3 if "exit" in words else 1), run.show()
    run.assert_nothing_left()


def test_workers_with_several_threads_each_are_forked_from_a_process_with_one(run: Run) -> None:
    program = run.folder / "program.py"
    program.write_text(
        "import os, pathlib, sys, torch\n"
        "pathlib.Path(os.environ['OUT'], 'threads').write_text(str(torch.get_num_threads()))\n"
        "sys.exit(3)\n"
    )

    run.start(
        "n0",
        *("--nproc-per-node", "1"),
        program=(str(program),),
        # Else the imports are those of the test's own process.
        is_real=True,
        variables={"OMP_NUM_THREADS": "2"},
    )

    assert run.wait() == 3, run.show()
    assert (run.folder / "out" / "threads").read_text() == "2"
    assert "forked safely" not in run.text()
