"""What the agent's command line says, and how it is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from resilience.agent import __main__
from resilience.agent.__main__ import main
from resilience.agent.options import parse_options
from resilience.agent.processes.output import Output

PROGRAM = ["--", "python", "train.py", "--steps", "3"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with the program that is named."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_are_a_run_of_one_process() -> None:
    options = parse_options(PROGRAM)

    assert options.program == ("train.py", "--steps", "3")
    assert (options.nnodes, options.workers_per_node, options.spares_per_node) == ((1, 1), 1, 1)
    assert options.node_name


@pytest.mark.parametrize(
    ("words", "has_torch", "has_ours"),
    [
        ([], True, True),
        (["--preload", "torch", "--preload", "json"], True, True),
        (["--preload", "json"], False, False),
        (["--no-recovery"], True, False),
    ],
)
def test_workers_are_forked_with_what_recovery_needs_of_torch(
    words: list[str], has_torch: bool, has_ours: bool
) -> None:
    """Else each spare imports it as it starts, while a rank may wait for one."""
    modules = __main__._preloaded(parse_options([*words, *PROGRAM]))

    assert ("torch" in modules) is has_torch
    assert ("resilience.checkpointless.recovery" in modules) is has_ours
    assert ("resilience.inprocess.block" in modules) is has_ours
    assert all(find_spec(name) for name in modules)


def test_run_without_recovery_has_no_spares_and_more_patience() -> None:
    options = parse_options(["--no-recovery", *PROGRAM])

    assert (options.recovers, options.spares_per_node, options.max_restarts) == (False, 0, 0)
    assert (options.term_deadline_s, parse_options(PROGRAM).term_deadline_s) == (30.0, 15.0)
    assert (options.grace_s, parse_options(PROGRAM).grace_s) == (30.0, 15.0)


@pytest.mark.parametrize(
    ("words", "deadline_s"),
    [
        (["--term-deadline-s", "7"], 15.0),
        (["--term-deadline-s", "7", "--stop-deadline-s", "9"], 9.0),
        (["--no-recovery", "--term-deadline-s", "7"], 7.0),
        (["--no-recovery"], 30.0),
    ],
)
def test_workers_that_do_not_recover_stop_by_ending(words: list[str], deadline_s: float) -> None:
    """A lost node has that long to come back, beside the time to join."""
    options = parse_options([*words, "--join-deadline-s", "60", *PROGRAM])

    told = __main__._agent_options(options, "127.0.0.1", ()).coordinator

    assert (told.join_deadline_s, told.stop_deadline_s) == (60.0, deadline_s)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["python", "-m", "json.tool", "x"], ("-m", "json.tool", "x")),
        (["/usr/bin/python3.11", "train.py"], ("train.py",)),
        (["train.py", "--", "b"], ("train.py", "--", "b")),
        (["python", "app"], ("app",)),
    ],
)
def test_program_may_be_given_in_several_ways(
    command: list[str], program: tuple[str, ...], folder: Path
) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").touch()

    assert parse_options(["--", *command]).program == program


@pytest.mark.parametrize(("text", "nodes"), [("3", (3, 3)), ("2:5", (2, 5)), ("1:1", (1, 1))])
def test_number_of_nodes_may_be_a_range(text: str, nodes: tuple[int, int]) -> None:
    assert parse_options(["--nnodes", text, *PROGRAM]).nnodes == nodes


def test_connections_that_are_made_late_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")

    assert not parse_options(["--no-recovery", *PROGRAM]).recovers
    with pytest.raises(SystemExit) as caught:
        main(PROGRAM)
    assert caught.value.code == 2
    assert "TORCH_GLOO_LAZY_INIT is '1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param([], "no program in ''", id="no-program"),
        pytest.param(["--", "python"], "no program in ''", id="python-alone"),
        pytest.param(["--", "python", "-m"], "no program in '-m'", id="no-module"),
        pytest.param(["--", "python", "-c", "x"], "no program in '-c x'", id="code"),
        pytest.param(
            ["--nnodes", "0", *PROGRAM],
            "--nnodes: '0': Input should be greater than or equal to 1",
            id="no-node",
        ),
        pytest.param(["--nnodes", "3:2", *PROGRAM], "'3:2' has more nodes at least", id="range"),
        pytest.param(
            ["--partition-patience-s", "2", *PROGRAM],
            "--partition-patience-s: 2 is less than --lease-s 3",
            id="no-patience",
        ),
        pytest.param(
            ["--nnodes", "2:3", "--standby-nodes", "1", *PROGRAM],
            "--standby-nodes: 1 is not allowed with --nnodes 2:3",
            id="standbys-twice",
        ),
        pytest.param(
            ["--lease-s", "0.01", *PROGRAM],
            "--lease-s: '0.01': Input should be greater than or equal to 0.1",
            id="no-lease",
        ),
        pytest.param(
            ["--rdzv-endpoint", "a:1,b:1,a:1", *PROGRAM],
            "--rdzv-endpoint: 'a:1,b:1,a:1' has a:1 twice",
            id="endpoint-twice",
        ),
        pytest.param(["--run-dir", "", *PROGRAM], "--run-dir: '' names no folder", id="no-folder"),
        pytest.param(
            ["--preload", "no_such.module", *PROGRAM],
            "--preload: no module 'no_such' for 'no_such.module'",
            id="no-such-preload",
        ),
        pytest.param(
            ["--", "python", "-m", "no_such"],
            "argument -m: no module 'no_such'",
            id="no-such-module",
        ),
        pytest.param(
            ["--restart-window-s", "1h", *PROGRAM],
            "--restart-window-s: '1h': Input should be a valid integer",
            id="window",
        ),
        pytest.param(
            ["--nnodes", "2:x", *PROGRAM],
            "'x': Input should be a valid",
            id="words",
        ),
        pytest.param(
            ["--nproc-per-node", "gpu", *PROGRAM],
            "'gpu': Input should be a",
            id="ranks",
        ),
        pytest.param(
            ["--spares", "-1", *PROGRAM],
            "'-1': Input should be greater",
            id="negative",
        ),
        pytest.param(
            ["--node-state-command", "no-such-program -x", *PROGRAM],
            "--node-state-command: 'no-such-program -x' begins with no program that is found",
            id="no-state-command",
        ),
        pytest.param(
            ["--node-state-command", "sh -c 'x", *PROGRAM],
            "is no command line: No closing quotation",
            id="half-a-state-command",
        ),
        pytest.param(
            ["--rdzv-attempt", "-1", *PROGRAM],
            "argument --rdzv-attempt: '-1': Input should be greater",
            id="attempt",
        ),
        pytest.param(["--rdzv-endpoint", "host", *PROGRAM], "'host' is not HOST:PORT", id="port"),
        pytest.param(
            ["--rdzv-endpoint", "n0:1,0.0.0.0:1", *PROGRAM],
            "--rdzv-endpoint: '0.0.0.0' is no address that others can reach",
            id="every-address",
        ),
        pytest.param(["--rdzv-endpoint", "h:0", *PROGRAM], "'h:0' is not HOST:PORT", id="port-0"),
        pytest.param(["--rdzv-endpoint", "h:70000", *PROGRAM], "is not HOST:PORT", id="high-port"),
        pytest.param(
            ["--hang-deadline-s", "0", *PROGRAM],
            "'0': Input should be",
            id="no-time",
        ),
        pytest.param(
            ["--hang-deadline-s", "nan", *PROGRAM],
            "'nan': Input should be a",
            id="nan",
        ),
        pytest.param(
            ["--join-deadline-s", "inf", *PROGRAM],
            "'inf': Input should be a",
            id="inf",
        ),
        pytest.param(
            ["--warm", "all", *PROGRAM],
            "'all': Input should be 'imp",
            id="warm",
        ),
        pytest.param(
            ["--transfer-buffer-mib", "0", *PROGRAM],
            "'0': Input should be greater",
            id="buffer",
        ),
        pytest.param(["--nope", *PROGRAM], "unrecognized arguments: --nope", id="unknown"),
        pytest.param(["--nnode", "2", *PROGRAM], "unrecognized arguments", id="abbreviation"),
        pytest.param(
            ["--nproc-per-node", "4", "--shards", "3", *PROGRAM],
            "--shards: 3 does not divide the world size 4 (--nnodes 1 x --nproc-per-node 4)",
            id="shards",
        ),
        pytest.param(
            ["--nproc-per-node", "4", "--shards", "2", "--stages", "4", *PROGRAM],
            "--stages: 4 does not divide --shards 2, the ranks that together hold one copy",
            id="stages",
        ),
        pytest.param(
            ["--no-recovery", "--standby-nodes", "1", *PROGRAM],
            "--standby-nodes: 1 lets nodes stand by, which needs recovery",
            id="standby",
        ),
        pytest.param(
            ["--no-recovery", "--nnodes", "2:3", *PROGRAM],
            "--nnodes: 2:3 lets nodes stand by, which needs recovery",
            id="range-without-recovery",
        ),
        pytest.param(
            ["--no-recovery", "--warm", "program", *PROGRAM],
            "--warm: program is not allowed with --no-recovery",
            id="warm-without-recovery",
        ),
        pytest.param(
            ["--no-recovery", "--spares", "1", *PROGRAM],
            "--spares: 1 is not allowed with --no-recovery",
            id="spares-without-recovery",
        ),
        pytest.param(
            ["--max-restarts", "1", *PROGRAM],
            "--max-restarts: 1 counts restarts of all workers",
            id="restarts-of-all",
        ),
        *(
            pytest.param(
                ["--no-recovery", *words, *PROGRAM],
                f"argument {words[0].partition('=')[0]}: of no use without recovery",
                id=f"{words[0].partition('=')[0]}-without-recovery",
            )
            for words in (
                ["--hang-deadline-s", "300"],
                ["--stop-deadline-s=9"],
                ["--transfer-buffer-mib", "32"],
                ["--restarts-max", "1"],
                ["--restarts-without-progress-max", "1"],
                ["--node-state-command", "true"],
            )
        ),
        pytest.param(
            ["--memoryd=--http-open", *PROGRAM],
            "argument --memoryd: '--http-open' is for a checkpoint daemon that --config describes",
            id="memoryd-without-config",
        ),
        *(
            pytest.param(
                ["--node-name", name, *PROGRAM],
                f"argument --node-name: {name!r} cannot be the name of a folder",
                id=f"name-{number}",
            )
            for number, name in enumerate(("", "a/b", "..", "a\nb", "n" * 256))
        ),
        pytest.param(
            ["--local-addr", "192.0.2.1", *PROGRAM],
            "argument --token-file: none is given, and others reach '192.0.2.1'; give all agents",
            id="no-token",
        ),
        pytest.param(
            ["--local-addr", "192.0.2.1", "--token-file", "/dev/null", *PROGRAM],
            "argument --token-file: '/dev/null' cannot be read: ",
            id="empty-token",
        ),
        pytest.param(
            ["--token-file", "missing", *PROGRAM],
            "argument --token-file: 'missing' cannot be read",
            id="missing-token",
        ),
        *(
            pytest.param(
                ["--local-addr", host, *PROGRAM],
                f"argument --local-addr: {host!r} is no address that others can reach",
                id=f"address-{host}",
            )
            for host in ("0.0.0.0", "::", "", "a..b")
        ),
        pytest.param(
            ["--config", "/dev/null", *PROGRAM],
            "argument --config: '/dev/null' cannot be read: is no plain file",
            id="config-device",
        ),
        pytest.param(
            ["--config", ".", *PROGRAM],
            "argument --config: '.' cannot be read: is no plain file",
            id="config-folder",
        ),
        pytest.param(
            ["--", "python", "missing.py"],
            "no program in 'missing.py'; workers are forked from a Python process",
            id="missing-program",
        ),
        pytest.param(["--", "python", "."], "no program in '.'", id="folder"),
        pytest.param(["train.py"], "unrecognized arguments: train.py|no program", id="no-dashes"),
    ],
)
def test_wrong_options_end_with_status_2_and_one_message(
    words: list[str],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)

    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert caught.value.code == 2
    assert any(part in line for part in message.split("|"))
    assert output.out == ""
    assert [each.name for each in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize(("status", "within_s"), [(0, 60.0), (75, 5.0), (143, 5.0)])
def test_what_is_to_be_written_has_longer_where_the_run_has_ended_well(
    status: int, within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    close = Output.close

    def note(output: Output, seconds: float) -> None:
        asked.append(seconds)
        close(output, seconds)

    monkeypatch.setattr(Output, "close", note)
    monkeypatch.setattr(__main__, "_run", lambda *arguments: status)

    assert main(PROGRAM) == status
    assert asked == [within_s]
