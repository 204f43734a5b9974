"""The file that agent and daemon read, and how a wrong one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilience.agent.options import parse_options as parse_agent
from resilience.tiered.memoryd.options import parse_options as parse_memoryd
from tests.launcher.shipped import rendered, shipped_job

TEXT = rendered(shipped_job("llama/llama3_tiny_tiered", "local"))["node.json"]


def agent(path: Path, *words: str) -> Any:
    return parse_agent(
        [
            "--rdzv-endpoint=127.0.0.1:1",
            "--config",
            str(path),
            *words,
            "--",
            "python",
            "-m",
            "json.tool",
        ]
    )


def memoryd(path: Path, *words: str) -> Any:
    return parse_memoryd(["--config", str(path), *words])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "node.json").write_text(TEXT)
    return tmp_path / "node.json"


def test_file_says_what_the_recipe_says(path: Path) -> None:
    given = agent(path)

    assert (given.nnodes, given.workers_per_node, given.recovers) == ((2, 2), 2, True)
    assert (given.hang_deadline_s, given.spares_per_node) == (10.0, 1)
    assert memoryd(path).budget_bytes == 32 << 20


def test_what_a_person_types_wins_over_the_file(path: Path) -> None:
    assert agent(path, "--hang-deadline-s", "7").hang_deadline_s == 7.0
    assert memoryd(path, "--budget-mib", "8").budget_bytes == 8 << 20


@pytest.mark.parametrize("parse", [agent, memoryd])
@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("agent", "workers_per_node"), 0, "agent.workers_per_node 0: Input should be greater"),
        (("memoryd", "ram", "keep"), "1", "memoryd.ram.keep '1': Input should be a valid integer"),
        (("memoryd", "ram", "more"), 1, "memoryd.ram.more 1: Extra inputs are not permitted"),
        (("memoryd", "ram"), None, "memoryd.ram None: Input should be an object"),
        (("other",), 1, "other 1: Extra inputs are not permitted"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    parse: Callable[[Path], Any],
    keys: tuple[str, ...],
    value: object,
    message: str,
) -> None:
    content = section = json.loads(TEXT)
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    path.write_text(json.dumps(content))

    with pytest.raises(SystemExit, match="2"):
        parse(path)

    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error:" in each]
    assert f"argument --config: '{path}': {message}" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"{", "the whole file: Invalid JSON"),
        (b"\xff", "the whole file: Invalid JSON"),
        (b"{}", "agent: Field required"),
    ],
)
def test_file_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "node.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(SystemExit, match="2"):
        memoryd(path)

    assert message in capsys.readouterr().err


@pytest.mark.parametrize("parse", [agent, memoryd])
def test_store_that_nobody_has_named_is_no_run_without_one(
    path: Path, capsys: pytest.CaptureFixture[str], parse: Callable[[Path], Any]
) -> None:
    """A script that was rendered so may be handed to the scheduler by hand."""
    job = shipped_job("llama/llama3_tiny_pretrain", "slurm", ["resilience/tiered=store"])
    path.write_text(rendered(job)["node.json"])

    with pytest.raises(SystemExit, match="2"):
        parse(path)

    assert (
        f"argument --config: '{path}': memoryd.store.url is null; set resilience.tiered.store.url "
        "or cluster.checkpoint_store_url, and render the job again"
    ) in capsys.readouterr().err
