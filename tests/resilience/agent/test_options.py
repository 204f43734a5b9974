"""What the agent's command line says, and how it is refused."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(("progress", "num_steps"), [([], None), (["transformers"], 40)])
def test_a_program_that_shows_no_steps_is_left_to_tell_its_progress(
    folder: Path, progress: list[str], num_steps: int | None
) -> None:
    program = {"executed": False, "folder": None, "alone": False, "hang_deadline_s": None}
    counts = {"nodes_min": 1, "nodes_max": 1, "workers_per_node": 1, "max_restarts": 0}
    agent = {**counts, "shards": None, "join_deadline_s": 1, "checkpointless": None}
    told = {
        "run": None,
        "memoryd": None,
        "agent": {**agent, "program": {**program, "progress": progress}},
    }
    (folder / "node.json").write_text(json.dumps(told))

    options = parse_options(["--config=node.json", "--progress-steps=40", "--", "train.py"])

    assert __main__._num_steps(options) == num_steps


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
    assert (
        parse_options(["--nnodes", text, "--rdzv-endpoint=localhost:1", *PROGRAM]).nnodes == nodes
    )


def test_run_without_an_endpoint_is_named_after_its_folder() -> None:
    one, same, other = (
        parse_options(["--run-dir", each, *PROGRAM]) for each in ("run", "x/../run", "other")
    )
    assert (one.rdzv_endpoint, one.local_addr, one.rdzv_id) == ((), "127.0.0.1", same.rdzv_id)
    assert one.rdzv_id != other.rdzv_id


def test_connections_that_are_made_late_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")

    assert not parse_options(["--no-recovery", *PROGRAM]).recovers
    with pytest.raises(SystemExit) as caught:
        main(PROGRAM)
    assert caught.value.code == 2
    assert "TORCH_GLOO_LAZY_INIT is '1'" in capsys.readouterr().err


NO_PROGRAM = [
    ([], "no program in ''"),
    (["--", "python"], "no program in ''"),
    (["--", "python", "-m"], "no program in '-m'"),
    (["--", "python", "-c", "x"], "no program in '-c x'"),
    (["--", "python", "-m", "no_such"], "argument -m: no module 'no_such'"),
    (
        ["--", "python", "missing.py"],
        "no program in 'missing.py'; workers are forked from a Python process",
    ),
    (["--", "python", "."], "no program in '.'"),
    (["train.py"], "unrecognized arguments: train.py|no program"),
]
WRONG_WORDS = [
    ("--nnodes 0", "--nnodes: '0': Input should be greater than or equal to 1"),
    ("--nnodes 2", "--rdzv-endpoint: none is given for up to 2 nodes; give all agents"),
    ("--standby-nodes 1", "--rdzv-endpoint: none is given for up to 2 nodes; give all agents"),
    ("--nnodes 3:2", "'3:2' has more nodes at least"),
    ("--nnodes 2:x", "'x': Input should be a valid"),
    ("--partition-patience-s 2", "--partition-patience-s: 2 is less than --lease-s 3"),
    (
        "--nnodes 2:3 --standby-nodes 1",
        "--standby-nodes: 1 is not allowed with --nnodes 2:3",
    ),
    ("--lease-s 0.01", "--lease-s: '0.01': Input should be greater than or equal to 0.1"),
    ("--rdzv-endpoint a:1,b:1,a:1", "--rdzv-endpoint: 'a:1,b:1,a:1' has a:1 twice"),
    ("--rdzv-endpoint host", "'host' is not HOST:PORT"),
    ("--rdzv-endpoint h:0", "'h:0' is not HOST:PORT"),
    ("--rdzv-endpoint h:70000", "is not HOST:PORT"),
    (
        "--rdzv-endpoint n0:1,0.0.0.0:1",
        "--rdzv-endpoint: '0.0.0.0' is no address that others can reach",
    ),
    ("--run-dir=", "--run-dir: '' names no folder"),
    ("--preload no_such.module", "--preload: no module 'no_such' for 'no_such.module'"),
    ("--restart-window-s 1h", "--restart-window-s: '1h': Input should be a valid integer"),
    ("--nproc-per-node gpu", "'gpu': Input should be a"),
    ("--spares -1", "'-1': Input should be greater"),
    (
        "--node-state-command no-such-program",
        "--node-state-command: 'no-such-program' begins with no program that is found",
    ),
    ("--node-state-command sh'", "is no command line: No closing quotation"),
    ("--rdzv-attempt -1", "argument --rdzv-attempt: '-1': Input should be greater"),
    ("--hang-deadline-s 0", "'0': Input should be"),
    ("--hang-deadline-s nan", "'nan': Input should be a"),
    ("--join-deadline-s inf", "'inf': Input should be a"),
    ("--warm all", "'all': Input should be 'imp"),
    ("--transfer-buffer-mib 0", "'0': Input should be greater"),
    ("--nope", "unrecognized arguments: --nope"),
    ("--nnode 2", "unrecognized arguments"),
    (
        "--nproc-per-node 4 --shards 3",
        "--shards: 3 does not divide the world size 4 (--nnodes 1 x --nproc-per-node 4)",
    ),
    (
        "--nproc-per-node 4 --shards 2 --stages 4",
        "--stages: 4 does not divide --shards 2, the ranks that together hold one copy",
    ),
    ("--max-restarts 1", "--max-restarts: 1 counts restarts of all workers"),
    (
        "--memoryd=--http-open",
        "argument --memoryd: '--http-open' is for a checkpoint daemon that --config describes",
    ),
    (
        "--local-addr 192.0.2.1",
        "argument --token-file: none is given, and others reach '192.0.2.1'; give all agents",
    ),
    (
        "--local-addr 192.0.2.1 --token-file /dev/null",
        "argument --token-file: '/dev/null' cannot be read: ",
    ),
    ("--tls", "argument --tls: needs --token-file, since its keys derive from the token"),
    ("--token-file missing", "argument --token-file: 'missing' cannot be read"),
    ("--config /dev/null", "argument --config: '/dev/null' cannot be read: is no plain file"),
    ("--config .", "argument --config: '.' cannot be read: is no plain file"),
]
WITHOUT_RECOVERY = [
    ("--standby-nodes 1", "--standby-nodes: 1 lets nodes stand by, which needs recovery"),
    ("--nnodes 2:3", "--nnodes: 2:3 lets nodes stand by, which needs recovery"),
    ("--warm program", "--warm: program is not allowed with --no-recovery"),
    ("--spares 1", "--spares: 1 is not allowed with --no-recovery"),
    *(
        (words, f"argument {words.partition(' ')[0]}: of no use without recovery")
        for words in (
            "--hang-deadline-s 300",
            "--stop-deadline-s 9",
            "--transfer-buffer-mib 32",
            "--restarts-max 1",
            "--restarts-without-progress-max 1",
            "--node-state-command true",
        )
    ),
]
WRONG_NAMES = ("", "a/b", "..", "a\nb", "n" * 256)
WRONG_ADDRESSES = ("0.0.0.0", "::", "", "a..b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *NO_PROGRAM,
        *(([*words.split(), *PROGRAM], message) for words, message in WRONG_WORDS),
        *(
            (["--no-recovery", *words.split(), *PROGRAM], message)
            for words, message in WITHOUT_RECOVERY
        ),
        *(
            (
                ["--node-name", name, *PROGRAM],
                f"argument --node-name: {name!r} cannot be the name of a folder",
            )
            for name in WRONG_NAMES
        ),
        (
            ["--operator-port=8080", "--operator-peer-port=8080", *PROGRAM],
            "argument --operator-peer-port: 8080 is --operator-port; want another one",
        ),
        (
            ["--operator-port=8080", "--rdzv-endpoint=localhost:1", *PROGRAM],
            "argument --rdzv-endpoint: localhost:1 is not allowed with --operator-port",
        ),
        *(
            (
                ["--local-addr", host, *PROGRAM],
                f"argument --local-addr: {host!r} is no address that others can reach",
            )
            for host in WRONG_ADDRESSES
        ),
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
