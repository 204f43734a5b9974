"""A secret in any place that takes a value gets nowhere: into no file, argument or log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.secrets import held_secrets
from tests.launcher.command import TIMEOUT_S, launch, put, refuse
from tests.launcher.shipped import CLUSTERS, shipped_job

CANARY = "ghp_canary0123456789canary0123456789canary"
TINY = "llama/llama3_tiny_pretrain"
LARGE = "llama/llama3_70b_pretrain_checkpointless"
MINE = f"# @package _global_\ndefaults:\n  - {TINY}\n  - _self_\n"
EVERYWHERE = ("+env.NOTE={0}", "recipe.description={0}", "resilience.tiered.store.url=folder:{0}")
# A key that a kind of cluster has, and others have not.
OF_A_KIND = {
    "local": ("+cluster.secrets.A.file=/home/{0}",),
    "slurm": ("cluster.pre_script='export A={0}'", "cluster.comment={0}", "cluster.modules=[{0}]",
              "+cluster.extra_options.wckey={0}", "cluster.container.image={0}"),
    "job": ("cluster.pre_script='export A={0}'", "+cluster.labels.a={0}", "cluster.python={0}",
            "+cluster.annotations.a='see {0}'", "cluster.image=registry/{0}",
            "cluster.probes.liveness={{command: [curl, '-H', {0}]}}"),
    "hyperpod": ("cluster.run_policy.log_monitoring=[{{name: a, pattern: {0}}}]",
                 "cluster.run_policy.workload_mode={0}"),
}  # fmt: skip
OURS = ("cluster.image=registry/ours:1",
        "cluster.volume_claims=[{claim_name: a, mount_path: /run/training}]")  # fmt: skip
PLACES = [
    *(("local", place) for place in EVERYWHERE),
    *((kind, place) for kind, places in OF_A_KIND.items() for place in places),
]


def spots(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each mapping or list with each key of it whose value is a text."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(value, str):
            yield node, key
        elif isinstance(value, (dict, list)):
            yield from spots(value)


def written(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_every_text_of_a_job_is_looked_at(kind: str) -> None:
    content = shipped_job(LARGE, kind).model_dump(mode="json")
    assert list(held_secrets(content)) == []

    for node, key in list(spots(content)):
        value, node[key] = node[key], f"a {CANARY}"
        told = list(held_secrets(content))
        node[key] = value
        assert told, key
        assert CANARY not in "".join(told)


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_override_with_a_secret_is_refused_and_not_repeated(
    tmp_path: Path, kind: str, place: str
) -> None:
    told = refuse(tmp_path, f"recipe={TINY}", *CLUSTERS[kind], place.format(CANARY))

    assert "(not shown)" in told
    assert CANARY not in told


# Nothing tells such a value from a word but the place where it stands.
PLAIN = "CANARYplain"
HELD = {
    "+cluster.secrets={{HUB: {0}}}": "cluster.secrets.HUB",
    "+cluster.secrets={{HUB:{0}}}": "cluster.secrets.HUB",
    "+cluster.secrets={{A: {{file: /x}}, HUB: {{value: {0}}}}}": "cluster.secrets.HUB",
    "+cluster.secrets.HUB={{value: {0}}}": "cluster.secrets.HUB",
    "+cluster.secrets.HUB.value={0}": "cluster.secrets.HUB",
    "+cluster.secrets={{HUB: {0}}},{{HUB: b}}": "cluster.secrets.HUB",
    "+cluster.secrets.HUB=choice({{a: {0}}},b)": "cluster.secrets.HUB",
    "cluster.secrets={0}": "cluster.secrets",
    "+env={{A: x, MY_PASSWORD: {0}, HF_TOKEN: {0}}}": "env.HF_TOKEN",
    "+hydra.sweeper.params={{env.HF_TOKEN: {0}}}": "env.HF_TOKEN",
    "+hydra.sweeper.params={{cluster.secrets.HUB: {0}}}": "cluster.secrets.HUB",
}


OPTIONS = ("--multirun trainer.seed=1,2", "--cfg job", "--info config")


@pytest.mark.parametrize(("held", "options"), [
    *((held, "") for held in HELD),
    *(("+cluster.secrets={{HUB: {0}}}", each) for each in OPTIONS),
    ("+hydra.sweeper.params={{env.HF_TOKEN: {0}}}", OPTIONS[0]),
])  # fmt: skip
def test_value_where_a_reference_belongs_is_refused_by_its_name(
    tmp_path: Path, held: str, options: str
) -> None:
    told = refuse(tmp_path, *options.split(), f"recipe={TINY}", "cluster=slurm", held.format(PLAIN))

    assert f"{HELD[held]} holds a value (not shown)" in told
    assert PLAIN not in told


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_value_below_an_entry_is_not_explained(tmp_path: Path, options: list[str]) -> None:
    told = refuse(tmp_path, "explain", f"recipe={TINY}", "cluster=slurm", *options,
                  f"+cluster.secrets={{HUB: {{value: {PLAIN}}}}}", "cluster.secrets")  # fmt: skip

    assert PLAIN not in told


@pytest.mark.parametrize(("secrets", "options"), [
    (f"{{HUB: {PLAIN}}}", ""), (f"{{HUB: {{value: {PLAIN}}}}}", OPTIONS[0]),
    (f"{{HUB: {PLAIN}}}", "--cfg job"), (f"{{HUB: {{value: {PLAIN}}}}}", "--cfg all"),
])  # fmt: skip
def test_value_in_a_profile_is_refused_with_the_file(
    tmp_path: Path, secrets: str, options: str
) -> None:
    path = put(
        tmp_path / "conf/cluster/ours.yaml", f"defaults: [slurm, _self_]\nsecrets: {secrets}\n"
    )
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"{MINE}cluster:\n  secrets: {secrets}\n")

    told = refuse(tmp_path, *options.split(), f"recipe={TINY}", "cluster=ours")
    told_of_mine = refuse(tmp_path, *options.split(), "recipe=mine.yaml", "cluster=slurm")
    info = launch("--info", "config", f"recipe={TINY}", "cluster=ours", folder=tmp_path)

    for each, file in ((told, path), (told_of_mine, mine)):
        assert each.startswith(f"{file}: cluster.secrets.HUB holds a value (not shown); allowed: ")
        assert "cluster/secrets" not in each
        assert PLAIN not in each
    # Hydra begins with a headline.
    assert info.status == 2
    assert PLAIN not in info.out + info.err


def test_value_that_an_entry_refers_to_is_refused_and_not_shown(tmp_path: Path) -> None:
    told = refuse(tmp_path, f"recipe={TINY}", "cluster=slurm", f"+env.A={PLAIN}",
                  "+cluster.secrets.HUB=${env.A}")  # fmt: skip

    assert "cluster.secrets.HUB (not shown): allowed: a mapping of keys to values; " in told
    assert "it says where the secret is, as {file: PATH}" in told
    assert PLAIN not in told


def test_path_of_a_secrets_file_is_shown(tmp_path: Path) -> None:
    told = refuse(tmp_path, f"recipe={TINY}", "cluster=slurm", "+cluster.secrets.HUB.file=hub")

    assert "cluster.secrets.HUB.file 'hub': allowed: an absolute path" in told
    assert "cluster.secrets.HUB.file 'hub': command line" in told
    assert "it says where" not in told


def test_line_below_a_message_hides_what_the_message_hides(tmp_path: Path) -> None:
    told = refuse(tmp_path, f"recipe={TINY}", f"+env={{A: {{B: {PLAIN}}}, 1A: {PLAIN}}}")

    assert "env.1A (not shown): allowed" in told
    assert "env.1A (not shown): command line" in told
    assert PLAIN not in told


@pytest.mark.parametrize("words", [
    ["trainer.sed=1,2"], ["trainer.seed=x,y"], ["trainer.seed=1,2", "data.seq_length=999999"],
    ["trainer.seed=x,y", "hydra.sweep.dir=a/b"], ["trainer.seed=x,y", "hydra.sweep.dir=old"],
], ids=" ".join)  # fmt: skip
def test_sweep_that_is_refused_leaves_nothing(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "old/empty").mkdir(parents=True)

    refuse(tmp_path, "-m", f"recipe={TINY}", *words)


def test_sweep_keeps_the_jobs_before_one_that_is_refused(tmp_path: Path) -> None:
    ended = launch("-m", f"recipe={TINY}", "trainer.seed=1,x", folder=tmp_path)

    assert ended.status == 2
    assert len(list(tmp_path.glob("multirun/*/*/0/job.json"))) == 1


def test_file_with_a_secret_is_refused_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"{MINE}env:\n  NOTE: {CANARY}\n")
    put(
        tmp_path / "conf/cluster/ours.yaml",
        f"defaults: [slurm, _self_]\nsecrets: {{}}\nnote: {CANARY}\n",
    )
    frozen = launch("freeze", f"recipe={TINY}", "+env.NOTE=harmless", folder=tmp_path).out
    lines = [line for line in frozen.splitlines() if not line.startswith("# content")]
    (tmp_path / "frozen.yaml").write_text("\n".join(lines).replace("harmless", CANARY) + "\n")
    for words in (["recipe=mine.yaml"], ["recipe=frozen.yaml"], [f"recipe={TINY}", "cluster=ours"]):
        for options in ([], ["--cfg", "job"], ["--cfg", "all"]):
            assert CANARY not in refuse(tmp_path, *options, *words)


@pytest.mark.parametrize(("kind", "program"), [("slurm", "sbatch"), ("job", "kubectl")])
def test_secret_that_a_submission_refers_to_is_in_no_argument_and_no_file(
    tmp_path: Path, kind: str, program: str
) -> None:
    (tmp_path / "bin").mkdir()
    secret = tmp_path / "secret"
    secret.write_text(CANARY)
    secret.chmod(0o600)
    path = tmp_path / "bin" / program
    job = '{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a", "uid": "b"}}'
    answer = "echo 7" if program == "sbatch" else f"echo '{job}'"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{tmp_path}/words\n{answer}\n')
    path.chmod(0o755)
    reference = f"{{file: {secret}}}" if kind == "slurm" else "{name: hub, key: token}"

    ended = launch(
        f"recipe={TINY}", *CLUSTERS[kind], "action=submit", f"+cluster.secrets.HUB={reference}",
        *(OURS if kind == "job" else []),
        folder=tmp_path,
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HUB": CANARY},
    )  # fmt: skip

    assert ended.status == 0, ended.err
    assert CANARY not in ended.out + ended.err
    secret.unlink()
    assert (tmp_path / "words").exists()
    assert [path for path, text in written(tmp_path).items() if CANARY in text] == []


@pytest.mark.slow
def test_secret_of_a_run_on_this_machine_is_in_no_argument_file_or_log(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    secret = tmp_path / "home/secret"
    secret.write_text(CANARY)
    secret.chmod(0o600)
    words = (f"recipe={TINY}", "action=run", "trainer.max_steps=20", "run.dir=run",
             f"+cluster.secrets.HUB.file={secret}")  # fmt: skip
    seen: set[str] = set()
    with subprocess.Popen(
        [sys.executable, "-m", "launcher", *words],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as run:  # fmt: skip
        while run.poll() is None:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    continue
        told, _ = run.communicate(timeout=TIMEOUT_S)

    assert run.returncode == 0, told
    assert any("resilience.agent" in line for line in seen)
    assert [line for line in seen if CANARY in line] == []
    assert CANARY not in told
    assert [path for path, text in written(tmp_path / "run").items() if CANARY in text] == []
    assert json.loads((tmp_path / "run/job.json").read_text())["cluster"]["secrets"]
