"""The programs of docs/tiered.md, run as they stand beside the daemon that the page starts."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.tiered.client import TieredClient
from resilience.tiered.memoryd.options import parse_options
from tests.ports import free_ports
from tests.resilience.rank_processes import run_ranks
from tests.resilience.tiered.daemons import ROOT
from tests.tokens import write_token
from tests.waiting import wait_until

_PAGE = (ROOT / "docs" / "tiered.md").read_text("utf-8")
_SECTION = _PAGE.partition("\n## Without the launcher\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    """Return what stands between fences of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", _SECTION, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder in which the page's daemon runs."""
    (commands,) = blocks("sh")
    scripts = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment = {**os.environ, **scripts, "PYTHONPATH": str(ROOT)}
    script = f"set -e\n{commands}\necho $!"
    with (tmp_path / "said").open("w") as output:
        # Not a pipe: the daemon keeps it, and its end would be waited for.
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
    said = (tmp_path / "said").read_text()
    assert done.returncode == 0, said
    yield tmp_path
    daemon = int(said.split()[-1])
    os.kill(daemon, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{daemon}").exists())


def run_page(rank: int, world_size: int, program: str, folder: str, port: int) -> None:
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    output = os.open(f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    exec(compile(program, "docs/tiered.md", "exec"), {"__name__": "__main__"})


def run_all(program: str, folder: Path, world_size: int) -> list[str]:
    """Run a program of the page on so many ranks; returns what each has printed."""
    run_ranks(run_page, world_size, program, str(folder), free_ports(1)[0])
    return [(folder / f"output-{rank}").read_text() for rank in range(world_size)]


@pytest.mark.parametrize(
    ("number", "namespace", "again_on"),
    [pytest.param(0, "run", 2, id="saver"), pytest.param(1, "dcp", 1, id="dcp")],
)
def test_program_of_the_page_goes_on_where_it_was(
    folder: Path, number: int, namespace: str, again_on: int
) -> None:
    program = blocks("python")[number]
    token = (folder / "token").read_text().strip()

    began = run_all(program, folder, 2)
    with TieredClient(
        folder / "arena" / "memoryd.sock", token=token, namespace=namespace, job=namespace
    ) as client:
        newest = client.steps()[0].step
    again = run_all(program, folder, again_on)

    assert began == [f"rank {rank} begins at step 0\n" for rank in range(2)]
    assert newest in (30, 40)
    assert again == [f"rank {rank} begins at step {newest}\n" for rank in range(again_on)]


def test_options_for_several_nodes_are_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token(Path("token"), "x" * 32)
    Path("token").chmod(0o600)
    (command,) = blocks("")
    words = shlex.split(command.replace("\\\n", " "))

    assert words[:3] == ["python", "-m", "resilience.tiered.memoryd"]
    assert parse_options(words[3:]).local.own.name == "a"
