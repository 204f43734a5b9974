"""Completion of the script `launcher`, as its key is pressed in each shell."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.commands.usage import COMMANDS as COMMANDS_OF_LAUNCHER
from tests.launcher.command import launch

SCRIPTS = Path(sys.executable).parent
TIMEOUT_S = 60
COMMANDS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
TINY = "llama/llama3_tiny_pretrain"


@pytest.fixture
def team(tmp_path: Path) -> Path:
    (tmp_path / "recipes" / "ours").mkdir(parents=True)
    (tmp_path / "recipes" / "ours" / "mine_alone.yaml").write_text(
        f"# @package _global_\ndefaults: [{TINY}, _self_]\nrecipe: {{name: ours/mine_alone}}\n"
    )
    return tmp_path


@pytest.mark.parametrize(("line", "words"), [
    ("launcher recipe=llama/llama3_8", ["recipe=llama/llama3_8b_pretrain"]),
    ("launcher recipe=ours", ["recipe=ours/mine_alone"]),
    ("launcher rec", ["recipe="]),
    ("launcher cluster=s", ["cluster=slurm"]),
    ("launcher trainer=", ["trainer=megatron", "trainer=script", "trainer=torch"]),
    (f"launcher recipe={TINY} trainer.max_", ["trainer.max_restarts=", "trainer.max_steps="]),
    (f"launcher recipe={TINY} resilience/m", ["resilience/mmap="]),
    # What is typed so far may be wrong: nothing is said into the person's line.
    ("launcher recipe=ours/nowhere trainer.max_", []),
    ("launcher recipe=[ trainer.max_", []),
    ("launcher --nonsense trainer.max_", []),
])  # fmt: skip
def test_a_shell_is_told_what_may_follow(
    team: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: list[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)

    ended = launch("-sc", "query=bash", folder=team)

    assert (ended.out.split(), ended.err) == (words, "")


@pytest.fixture(params=COMMANDS)
def typed(
    request: pytest.FixtureRequest, team: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], str]]:
    """Type into a shell that has evaluated the completion, and return what it shows."""
    shell = request.param
    if not shutil.which(shell):
        pytest.skip(f"no {shell} on this machine")
    variables = {"PATH": f"{SCRIPTS}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(team)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(team)
    child, terminal = pty.fork()
    if not child:
        os.execvp(COMMANDS[shell][0], COMMANDS[shell])

    def send(text: str, until: str) -> str:
        os.write(terminal, text.encode())
        shown = ""
        while until not in shown:
            assert select.select([terminal], [], [], TIMEOUT_S)[0], f"nothing follows {shown!r}"
            shown += os.read(terminal, 4096).decode(errors="replace")
        return shown

    script = f"launcher completion {shell}"
    # Quoted apart, so that the shell's echo of the line is not taken for its answer.
    send(f'{script} | source; echo rea""dy\n' if shell == "fish" else
         f'eval "$({script})"; echo rea""dy\n', "ready")  # fmt: skip
    yield send
    os.close(terminal)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_key_completes_recipes_names(typed: Callable[[str, str], str]) -> None:
    typed("launcher recipe=ours/mi\t", "ours/mine_alone")


def test_fish_keeps_its_own_completion_of_python(tmp_path: Path) -> None:
    ended = launch("completion", "fish", folder=tmp_path)

    completed = [line for line in ended.out.splitlines() if line.startswith("complete ")]
    assert completed == ["complete -c launcher -x -a '(hydra_fish_completion)'"]


@pytest.mark.parametrize("command", [*COMMANDS_OF_LAUNCHER])
@pytest.mark.parametrize("order", ["{} --help", "{} -h", "{} something --help", "help {}"])
def test_each_command_has_a_help(tmp_path: Path, command: str, order: str) -> None:
    ended = launch(*order.format(command).split(), folder=tmp_path)

    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"usage: python -m launcher {command}")


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["help"], [f"recipe={TINY}", "-h"],
                                       [f"recipe={TINY}", "cluster=no", "--help"]])  # fmt: skip
def test_help_beside_a_recipe_is_ours(tmp_path: Path, arguments: list[str]) -> None:
    ended = launch(*arguments, folder=tmp_path)

    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("usage: python -m launcher recipe=NAME")
    assert "powered by" not in ended.out


def test_the_script_is_the_launcher(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPTS / "launcher", "show", f"recipe={TINY}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("recipe:\n")
