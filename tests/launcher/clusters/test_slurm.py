"""What a job becomes as a batch script, and what the script does with Slurm's answers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.clusters.sbatch_lines import option_line, parse_option_line
from launcher.clusters.slurm import JOB_SCRIPT, check_slurm, render_slurm
from launcher.clusters.slurm_submit import submit_slurm
from launcher.errors import OutsideError, RecipeError
from launcher.job import Job
from resilience.events import EventLog
from tests.launcher.shipped import TEMPLATES, changed_job, shipped_job, untiered_job

TINY = "llama/llama3_tiny_pretrain"
FAULTY = "llama/llama3_tiny_checkpointless"
LARGE = "llama/llama3_70b_pretrain_checkpointless"
HYPERPOD = "/opt/sagemaker_cluster"


def job_with(recipe: str, values: Mapping[str, Any]) -> Job:
    """Return a shipped job with other values, each under its dotted key."""
    made = untiered_job if recipe == TINY else shipped_job
    return changed_job(made(recipe, "slurm"), values)


def script(recipe: str = TINY, **values: Any) -> str:
    return render_slurm(job_with(recipe, values), TEMPLATES)[JOB_SCRIPT]


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]


def test_options_that_a_recipe_leaves_open_are_left_to_the_cluster() -> None:
    values = {"cluster.exclusive": False, "cluster.signal_before_end_s": None}
    left = {
        each.partition("=")[0] for each in set(options(script())) - {*options(script(**values))}
    }
    assert {each.partition("=")[0] for each in left} == {"exclusive", "signal"}


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [
        ("cluster.partition", "p5", "partition=p5"),
        ("cluster.account", "team", "account=team"),
        ("cluster.qos", "high", "qos=high"),
        ("cluster.reservation", "week", "reservation=week"),
        ("cluster.constraint", "a&b|c", 'constraint="a&b|c"'),
        ("cluster.exclude", "n[1-4],n7", 'exclude="n[1-4],n7"'),
        ("cluster.comment", 'say "it\'s" \\', 'comment="say \\"it\'s\\" \\\\"'),
        ("cluster.extra_options", {"switches": "1"}, "switches=1"),
        ("cluster.extra_options", {"nice": "true"}, "nice"),
    ],
)
def test_value_of_a_recipe_becomes_an_option(key: str, value: object, option: str) -> None:
    assert option in options(script(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "cluster.comment",
            "x" * 1025,
            "cluster.comment has 1025 bytes; Slurm allows at most 1024",
        ),
        (
            "cluster.extra_options",
            {"switchs": "1"},
            "cluster.extra_options.switchs: sbatch has no option --switchs; closest: switches",
        ),
        (
            "cluster.extra_options",
            {"spread-job": "yes"},
            "cluster.extra_options.spread-job 'yes': sbatch's --spread-job takes no value",
        ),
        (
            "cluster.signal_before_end_s",
            65536,
            "cluster.signal_before_end_s 65536 is more than Slurm can count to",
        ),
        (
            "cluster.container",
            {"image": "/a.sqsh", "mounts": ["/a:/b,/c:/d"], "mount_home": False},
            "cluster.container.mounts has '/a:/b,/c:/d'; allowed: source:destination",
        ),
    ],
)
def test_value_that_slurm_would_not_take_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        script(**{key: value})


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1))
def test_quoted_option_is_one_option(value: str) -> None:
    assert parse_option_line(option_line("comment", value), "here") == "comment"


HEADER = "#!/bin/bash\n#SBATCH --ignore-pbs\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "true", "a newline at its end"),
        ("true\n", "needs '#!' in its first line"),
        ("#!/bin/bash\ntrue\n", "needs '#SBATCH --ignore-pbs'"),
        (HEADER + "#SBATCH --nodes\n", "--nodes needs a value"),
        (HEADER + "#SBATCH --requeue=1\n", "--requeue takes no value"),
        (HEADER + "#SBATCH -N 2\n", "has 2 words; allowed: one --option"),
        (HEADER + "#SBATCH --nods=2\n", "no option '--nods=2'"),
        (HEADER + '#SBATCH --comment="a\n', "No closing quotation"),
        (HEADER + "#SBATCH --ignore-pbs\n", "stands in line 2 already"),
        (
            HEADER + "#SBATCH --comment=a\nb\n#SBATCH --nodes=2\n",
            "line 5: sbatch ignores '#SBATCH --nodes=2'",
        ),
    ],
)
def test_script_that_says_something_else_to_sbatch_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        check_slurm(text)


def write_program(path: Path, commands: str) -> None:
    path.write_text(f"#!/bin/bash\n{commands}\n")
    path.chmod(0o755)


def test_job_id_is_what_sbatch_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    job = shipped_job("llama/llama3_tiny_pretrain", "slurm")
    with pytest.raises(OutsideError, match="no program 'sbatch'"):
        submit_slurm(tmp_path, job)

    for printed in ("17", "17;east", "held for review"):
        write_program(tmp_path / "sbatch", f"echo '{printed}'")
        if printed.startswith("17"):
            assert submit_slurm(tmp_path, job).job_id == "17"
    with pytest.raises(OutsideError, match="printed no job id but 'held for review'"):
        submit_slurm(tmp_path, job)


SCONTROL = """\
if [ "$2" = job ]; then
  printf '   ReqNodeList=(null) ExcNodeList=(null)\\n   NodeList=%s\\n' "$NODES"
else
  tr , '\\n' <<<"$3"
fi
"""


# Then the step's tasks one by one, on the nodes that it has been given.
SRUN = """\
printf "%s\\n" "$@" >srun-words
while [[ $1 == --* ]]; do shift; done
for node in ${STEP_NODES//,/ }; do
  SLURMD_NODENAME=$node SLURM_STEP_NODELIST=$STEP_NODES SLURM_STEP_ID=${STEP_ID:-0} "$@"
done
exit "${SRUN_STATUS:-0}"
"""


def run_script(
    text: str,
    folder: Path,
    nodes: str,
    *,
    scontrol: str = SCONTROL,
    more: Mapping[str, str] = MappingProxyType({}),
    words: Sequence[str] = (),
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script as slurmd does, with programs in place of Slurm's that say what they got.

    `more` are the commands of further programs by their names, `words` those of the script itself.
    """
    programs = folder / "programs"
    programs.mkdir()
    # The script would unset what the programs in place of Slurm's are told.
    own = {name: env.pop(name) for name in tuple(env) if name.startswith(("SLURM", "BASH_FUNC"))}
    told = {"NODES": nodes, **env}
    prelude = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in told.items())
    write_program(programs / "scontrol", prelude + scontrol)
    write_program(programs / "srun", prelude + SRUN)
    write_program(programs / "python", 'printf "%s\\n" "$@" >"agent-$SLURMD_NODENAME"')
    for name, commands in more.items():
        write_program(programs / name, prelude + commands)
    (folder / "job.json").write_text("{}")
    (folder / "job.sbatch").write_text(text)
    slurm = {
        "SLURM_JOB_ID": "123456",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "gone-1,gone-2",
        "SLURMD_NODENAME": "node-3",
    }
    return subprocess.run(
        ["bash", folder / "job.sbatch", *words],
        env={"PATH": f"{programs}:{os.environ['PATH']}", **slurm, **own},
        capture_output=True,
        text=True,
        timeout=60,
    )


def srun_words(folder: Path) -> list[str]:
    return (folder / "srun-words").read_text().splitlines()


def agent_words(folder: Path, node: str) -> list[str]:
    """Return what the agent of a node was started with."""
    return (folder / f"agent-{node}").read_text().splitlines()


def test_nodes_are_those_that_the_controller_names(tmp_path: Path) -> None:
    """The environment still has the nodes of the first start after one was replaced."""
    done = run_script(script(), tmp_path, "node-3,node-7", SLURM_RESTART_COUNT="2")

    assert done.returncode == 0, done.stderr
    words = srun_words(tmp_path)
    assert words[-3:] == [str(tmp_path), "node-3,node-7", "2"]
    assert {"--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1"} <= set(words)
    assert "gone" not in " ".join(words)


@pytest.mark.parametrize(
    ("host", "endpoints"),
    [
        ("127.0.0.1", "127.0.0.1:4000,127.0.0.1:4001"),
        ("localhost", "localhost:4000,localhost:4001"),
        ("fabric of node-3", "fabric of node-3:4000"),
    ],
)
def test_given_address_is_of_the_first_node_or_of_the_machine_that_all_share(
    tmp_path: Path, host: str, endpoints: str
) -> None:
    text = script(**{"cluster.rdzv_host": host, "cluster.rdzv_port": 4000})

    done = run_script(text, tmp_path, "node-3,node-7", STEP_NODES="node-3,node-7")

    assert done.returncode == 0, done.stderr
    assert f"--rdzv-endpoint={endpoints}" in agent_words(tmp_path, "node-7")


def test_step_that_is_started_again_has_the_nodes_of_now(tmp_path: Path) -> None:
    """HyperPod's srun does so, within one start of the job, where it has replaced a node."""
    text = script("llama/llama3_tiny_tiered")

    done = run_script(text, tmp_path, "a,b", STEP_NODES="a,c", STEP_ID="1", SLURM_RESTART_COUNT="2")

    assert done.returncode == 0, done.stderr
    peers = set()
    for node in ("a", "c"):
        words = agent_words(tmp_path, node)
        assert {"--rdzv-endpoint=a:13456,c:13456", "--rdzv-attempt=2001"} <= set(words)
        assert "--memoryd=--peer-listen=0.0.0.0:23456" in words
        peers |= {word for word in words if word.startswith("--memoryd=--peers-file=")}
    # One name for one content: daemons that know other peers are not taken over.
    (path,) = (Path(word.rpartition("=")[2]) for word in peers)
    assert path.read_text() == "a=a:23456\nc=c:23456\n"


def test_node_that_knows_no_other_nodes_says_so(tmp_path: Path) -> None:
    text = script("llama/llama3_tiny_tiered").replace("type scontrol", "type no-such-program")

    run_script(text, tmp_path, "a,b", STEP_NODES="a,c")

    assert agent_words(tmp_path, "a")
    assert not (tmp_path / "agent-c").exists()
    (log,) = (tmp_path / "logs").glob("*.c.log")
    assert "c is none of the nodes a b, and nothing here says" in log.read_text()


def test_too_few_nodes_end_the_job_with_a_message(tmp_path: Path) -> None:
    done = run_script(script(), tmp_path, "node-3")

    assert done.returncode == 1
    assert "1 nodes (node-3) are too few; allowed: 2" in done.stderr


@pytest.mark.parametrize(
    ("recipe", "exclusive", "is_hyperpod", "has_option"),
    [
        pytest.param(TINY, True, True, True, id="hyperpod"),
        pytest.param("llama/llama3_tiny_tiered", True, True, True, id="with-daemons"),
        pytest.param(TINY, False, True, False, id="hyperpod-with-shared-nodes"),
        pytest.param(TINY, True, False, False, id="other-slurm"),
    ],
)
def test_failed_nodes_are_replaced_where_the_cluster_can_do_it(
    tmp_path: Path, recipe: str, exclusive: bool, is_hyperpod: bool, has_option: bool
) -> None:
    text = script(recipe, **{"cluster.exclusive": exclusive})
    assert HYPERPOD in text
    text = text.replace(HYPERPOD, str(tmp_path / "marker"))
    if is_hyperpod:
        (tmp_path / "marker").mkdir()

    done = run_script(text, tmp_path, "a,b")

    assert ("--auto-resume=1" in srun_words(tmp_path)) is has_option
    assert ("no auto-resume" in done.stderr) is (is_hyperpod and not has_option)


def test_container_has_the_runs_folder_and_the_recipes_mounts(tmp_path: Path) -> None:
    container = {"image": "/fsx/it's.sqsh", "mounts": ["/fsx:/fsx", "/a b:/b:ro"]}
    text = script(**{"cluster.container": {**container, "mount_home": False}})

    run_script(text, tmp_path, "a,b")

    assert {
        "--container-image=/fsx/it's.sqsh",
        f"--container-mounts={tmp_path}:{tmp_path},/fsx:/fsx,/a b:/b:ro",
        f"--container-workdir={tmp_path}",
        "--no-container-mount-home",
    } <= set(srun_words(tmp_path))


def test_modules_are_loaded_before_anything_else_runs(tmp_path: Path) -> None:
    text = script(**{"cluster.modules": ["cuda/12.4", "it's"]})
    module = '() { echo "$@"; [ "$UNSET_VARIABLE$2" != broken ]; }'

    done = run_script(text, tmp_path, "a,b", **{"BASH_FUNC_module%%": module})

    assert done.returncode == 0, done.stderr
    assert done.stdout == "load cuda/12.4\nload it's\n"


def test_module_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    text = script(**{"cluster.modules": ["cuda/12.4"]})

    done = run_script(text, tmp_path, "a,b", **{"BASH_FUNC_module%%": "() { return 1; }"})

    assert done.returncode == 1
    assert "cannot load the module cuda/12.4" in done.stderr


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        pytest.param("absent", "secret TOKEN_NAME: no file", id="no-such-file"),
        pytest.param("readable", "has mode 644; allowed: 600", id="others-may-read-it"),
        pytest.param("empty", "is empty", id="empty-file"),
        pytest.param(None, "secret TOKEN_NAME is not set; export it", id="not-exported"),
    ],
)
def test_unusable_secret_ends_the_job_with_a_message(
    tmp_path: Path, secret: str | None, message: str
) -> None:
    (tmp_path / "readable").write_text("swordfish")
    (tmp_path / "readable").chmod(0o644)
    (tmp_path / "empty").touch(mode=0o600)
    file = str(tmp_path / secret) if secret else None

    text = script(**{"cluster.secrets": {"TOKEN_NAME": {"file": file}}})
    done = run_script(text, tmp_path, "a,b")

    assert done.returncode == 1
    assert message in done.stderr
    assert "swordfish" not in done.stderr + done.stdout
    assert not (tmp_path / "srun-words").exists()


def test_run_that_recovers_goes_on_without_a_killed_task(tmp_path: Path) -> None:
    run_script(script(FAULTY), tmp_path, "a,b")

    words = srun_words(tmp_path)
    assert {"--nodes=2", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    assert not {"--kill-on-bad-exit=1", "--no-kill"} & set(words)


STANDBY = {"resilience.checkpointless.standby_nodes": 1}


def test_nodes_that_stand_by_are_asked_for_and_outlived() -> None:
    text = script(FAULTY, **STANDBY)

    assert {"nodes=3", "no-kill"} <= set(options(text))
    assert "no-kill" not in options(script(FAULTY))
    asked = {"cluster.extra_options": {"no-kill": "true"}}
    assert options(script(FAULTY, **STANDBY, **asked)).count("no-kill") == 1


@pytest.mark.parametrize(("given", "used"), [("a,b,c", 3), ("a,b", 2)])
def test_run_starts_with_as_many_standby_nodes_as_there_are(
    tmp_path: Path, given: str, used: int
) -> None:
    run_script(script(FAULTY, **STANDBY), tmp_path, given)

    assert {f"--nodes={used}", f"--ntasks={used}", "--no-kill"} <= set(srun_words(tmp_path))


@pytest.mark.parametrize(
    ("before", "finished", "status"),
    [
        pytest.param([], [0, 1, 2, 3], 0, id="every-rank-has-finished"),
        pytest.param([], [0, 1, 2], 9, id="one-has-not"),
        pytest.param([], [0, 1, 2, 2], 9, id="one-has-twice"),
        pytest.param([0, 1, 2, 3], [], 9, id="in-an-earlier-start"),
        pytest.param([], [None, 0, 1, 2, 3], 0, id="beside-other-events"),
    ],
)
def test_run_that_every_rank_finished_has_succeeded(
    tmp_path: Path, before: list[int], finished: list[int | None], status: int
) -> None:
    for name, ranks in (("events.jsonl", before), ("new", finished)):
        for rank in ranks:
            event = "run_started" if rank is None else "worker_finished"
            with EventLog(tmp_path / name, node="a", rank=rank, generation=1) as log:
                log.write(event, message='no "event":"worker_finished", at all')
    text = script(FAULTY, **STANDBY)
    assert "\nstep=$!\n" in text
    appending = "touch new && split -n r/2 --additional-suffix=.jsonl new events-"

    done = run_script(
        text.replace("step=$!\n", f"step=$!; {appending}\n"), tmp_path, "a,b,c", SRUN_STATUS="9"
    )

    assert done.returncode == status, done.stderr


def test_run_that_left_no_events_has_the_status_of_its_step(tmp_path: Path) -> None:
    done = run_script(script(FAULTY, **STANDBY), tmp_path, "a,b,c", SRUN_STATUS="9")

    assert (done.returncode, done.stderr) == (9, "")
