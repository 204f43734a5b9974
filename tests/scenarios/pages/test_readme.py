"""What the README and docs/recipes.md tell a newcomer to type, typed as it stands.

What the pages import, and the files that they name, are there.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.clusters.k8s.check import read_documents
from launcher.job import Job
from launcher.support import refusals
from resilience.agent.options import parse_options
from tests.launcher.command import launch

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text("utf-8")
PAGE = (ROOT / "docs" / "recipes.md").read_text("utf-8")
EXPLAIN = (ROOT / "docs" / "explain.md").read_text("utf-8")
RECOVERY = (ROOT / "docs" / "recovery.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = ".venv/bin/python -m launcher "
_IMPORT = re.compile(
    r"^from ((?:launcher|resilience|recipes_training)[\w.]*) import (.*)$", re.MULTILINE
)
_PATH = re.compile(
    r"`((?:benchmarks|conf|docker|examples|launcher|recipes|recipes_training|resilience|scripts|"
    r"templates|tests)/[\w./-]*)`"
)


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _launches(text: str) -> list[list[str]]:
    """Return the arguments of each launcher command in a block."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line.partition(" -m launcher ")[2]) for line in lines if PYTHON in line]


OWN, _, INIT = _section("Your own, step by step").partition("\n### A repository that exists\n")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty folder, in which a shell finds the launcher's script."""
    folder = tmp_path / "team"
    folder.mkdir()
    return folder


def _type(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "GIT_CONFIG_GLOBAL": "/dev/null"}
    return subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", text],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_recipe_of_ones_own_comes_to_be_as_the_page_says(repository: Path) -> None:
    """A profile, an instance, recipes on the 70B one, a template, from a subfolder."""
    done = _type("\n".join(_blocks(OWN, "sh")), repository)

    assert done.returncode == 0, done.stderr
    jobs = {
        path.parent.relative_to(repository).as_posix(): json.loads(path.read_text())
        for path in repository.rglob("job.json")
    }
    long, longer = jobs["runs/llama3-70b-long"], jobs["experiments/lr/runs/llama3-70b-longer"]
    assert long["recipe"]["name"] == "ours/llama3_70b_long"
    assert long["resilience"]["checkpointless"]["spares_per_node"] == 1
    assert longer["trainer"]["max_steps"] == 2000000
    assert longer["trainer"]["optimizer"]["lr"] == 1e-4
    for job in (long, longer):
        assert (job["instance"]["type"], job["trainer"]["num_nodes"]) == ("our-h100", 32)
    # The command line's cluster came after the recipe's own, into the same folder.
    assert long["cluster"]["kind"] == "k8s"
    script = (repository / "experiments/lr/runs/llama3-70b-longer/job.sbatch").read_text()
    assert "#SBATCH --partition=train\n" in script
    manifest = repository / "experiments/lr/runs/llama3-tiny-pretrain/manifest.yaml"
    pod = read_documents(manifest.read_text())[-1]["spec"]["template"]["spec"]
    assert pod["schedulerName"] == "gang-scheduler"
    resolved = yaml.safe_load((repository / "experiments/lr/resolved.yaml").read_text())
    assert resolved["trainer"]["pipeline_parallel"] == 8
    assert "ours/llama3_70b_long " in done.stdout
    # On the cluster that it names nothing keeps it from running, and it fits AWS's machine alike.
    assert refusals(Job.model_validate(longer)) == []
    planned = launch("plan", "recipe=ours/llama3_70b_long", "instance=ml.p5.48xlarge",
                     folder=repository)  # fmt: skip
    assert "\nmemory of a device: fits\n" in planned.out


def test_a_repository_begins_as_the_page_says(repository: Path) -> None:
    (block,) = _blocks(INIT, "sh")

    done = _type(f"git init --quiet\n{block}", repository)

    assert done.returncode == 0, done.stderr
    assert "ours/first is version 1 now\n" in done.stdout
    assert "ours/first is version 2 now\n" in done.stdout
    assert "  trainer.max_steps: 20 -> 30\n" in done.stderr
    assert done.stdout.endswith(
        "left as it is: conf/cluster/ours.yaml, for slurm\nleft as it is: recipes/ours/first.yaml\n"
        "left as it is: .pre-commit-config.yaml\nnext: launcher check --update -m 'as it begins'\n"
    )
    assert "max_steps: 30" in (repository / "recipes/ours/first.yaml").read_text()
    (hook,) = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text())["repos"]
    assert hook["hooks"][0]["entry"] == "launcher check"


def test_versions_are_kept_as_the_page_says(repository: Path) -> None:
    # The files alone: what the launcher makes of them is another test's.
    own = re.sub(r"^launcher .*\n", "", "\n".join(_blocks(OWN, "sh")), flags=re.MULTILINE)
    (block,) = _blocks(_section("Versions"), "sh")

    done = _type(f"({own}\n) >/dev/null 2>&1\n{block}", repository)

    assert done.returncode == 0, done.stderr
    assert "status 1\n" in done.stdout
    long, longer = "ours/llama3_70b_long", "ours/llama3_70b_longer"
    assert f"{long} is version 2 now\n{longer} is version 2 now\n" in done.stdout
    assert done.stderr.count("  data.seq_length: 3072 -> 2048\n") == 2
    history = re.findall(rf"^{long}@(\d)  .*  (.*)$", done.stdout, re.MULTILINE)
    assert history == [("1", "as they began"), ("2", "shorter sequences")]
    jobs = {
        name: json.loads((repository / "runs" / name / "job.json").read_text())
        for name in ("as-in-january", "short")
    }
    assert jobs["as-in-january"]["data"]["seq_length"] == 3072
    assert jobs["as-in-january"]["recipe"]["version"] == 1
    assert (jobs["short"]["data"]["seq_length"], jobs["short"]["trainer"]["max_steps"]) == (
        2048,
        1000,
    )
    assert (repository / "recipes/.versions" / f"{long}@1.yaml").is_file()


def test_overrides_are_typed_as_the_page_says(repository: Path) -> None:
    (block, completion) = _blocks(_section("Choosing and overriding"), "sh")

    done = _type(f"set -x\n{block}\n{completion}complete -p launcher", repository)

    assert done.returncode == 0, done.stderr
    assert "hydra_bash_completion launcher" in done.stdout
    assert (repository / "runs" / "lr=3e-4" / "job.json").is_file()
    assert len(list(repository.glob("multirun/**/job.json"))) == 3


def test_what_the_page_on_origins_types_is_answered_as_it_says(repository: Path) -> None:
    assert _type("\n".join(_blocks(EXPLAIN, "sh")), repository).returncode == 0
    shown = re.findall(r"^```\n(\$ .*?)^```$", EXPLAIN, re.MULTILINE | re.DOTALL)
    assert len(shown) > 4
    for block in shown:
        command, _, answer = block.partition("\n")

        done = _type(command.removeprefix("$ "), repository)

        assert done.stdout + done.stderr == answer, command


def test_the_page_shows_a_shipped_recipe_as_it_is() -> None:
    (shown,) = (block for block in _blocks(PAGE, "yaml") if "@package" in block)
    recipe = yaml.safe_load(shown)
    shipped = yaml.safe_load((ROOT / "recipes" / f"{recipe['recipe']['name']}.yaml").read_text())

    assert recipe == shipped


def test_the_readmes_manifest_runs_where_it_is_applied(tmp_path: Path) -> None:
    """Recovery and a store, on a plain Job: nothing is noted but the Secret of its daemons."""
    ((arguments,),) = [
        _launches(block) for block in _blocks(README, "") if "volume_claims" in block
    ]

    ended = launch(*arguments, folder=tmp_path)

    assert ended.status == 0, ended.err
    assert re.fullmatch(r"note: the pods wait for the Secret .*\n  .* \| kubectl .*\n", ended.err)
    run = tmp_path / "runs" / "llama3-70b-pretrain-checkpointless"
    job = json.loads((run / "job.json").read_text())
    assert job["trainer"]["num_nodes"] * job["trainer"]["num_devices"] == 128
    assert job["data"]["path"].startswith("/data/")
    assert job["data"]["tokenizer"].startswith("/data/")
    assert job["resilience"]["checkpointless"]
    assert job["resilience"]["tiered"]["backend"] == "memoryd"


def test_the_readmes_second_command_notes_only_what_a_site_knows(tmp_path: Path) -> None:
    """The store, the claim for the run and for its inputs, and the image."""
    (arguments,) = _launches(_blocks(README, "")[0])

    ended = launch(*arguments, folder=tmp_path)

    assert (ended.status, len(arguments)) == (0, 2), ended.err
    assert [re.split(r" null| '", line)[0] for line in ended.err.splitlines()] == [
        "note: resilience.tiered.store.url",
        "note: cluster.run_path",
        "note: data.path",
        "note: cluster.image",
    ]


def test_the_readmes_table_names_commands_that_there_are(tmp_path: Path) -> None:
    rows = re.findall(r"`python -m launcher ([^`]*)`", README)
    assert len(rows) > 6
    for row in rows:
        arguments = [word for word in shlex.split(row) if not word.startswith("action=")]

        ended = launch(*arguments, folder=tmp_path)

        assert ended.status == 0, (row, ended.err)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_modules_and_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    # A group's folder is named as on the command line, without conf/.
    missing = [
        name
        for name in _PATH.findall(text)
        if not ((ROOT / name).exists() or (ROOT / "conf" / name).exists())
    ]

    assert missing == []
    for module, names in _IMPORT.findall(text):
        assert [each for each in names.split(", ") if not has_name(module, each)] == [], module


def has_name(module: str, name: str) -> bool:
    """Return whether a module has a name; by its file where its framework is not installed."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text("utf-8"))
        return name in {each.name for each in tree.body if isinstance(each, ast.ClassDef)}


def test_the_table_of_settings_on_recovery_has_every_default() -> None:
    path = ROOT / "conf" / "resilience" / "checkpointless" / "default.yaml"
    settings = yaml.safe_load(path.read_text("utf-8"))
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|.*\| ([^|]+) \|$", RECOVERY, re.MULTILINE)
    shown = {
        name.strip("`"): yaml.safe_load(value)
        for names, values in rows
        for name, value in zip(names.split(", "), values.split(", "), strict=True)
    }

    assert shown == settings
    options = parse_options(["--", "python", __file__])
    # The agent's program checks itself, or does not.
    assert {name: getattr(options, name, None) for name in settings} == settings


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def test_architecture_names_all_that_the_launcher_takes_of_resilience() -> None:
    taken = set()
    for path in (ROOT / "launcher").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("resilience"):
                taken.add(str(node.module).removeprefix("resilience.").replace(".", "/"))
    sentence = ARCHITECTURE.partition("Of `resilience` the launcher takes")[2].partition("Nothing")[
        0
    ]

    named = set(re.findall(r"`([\w/]+)`", sentence))
    assert named <= taken
    # Of its packages, in which most is not for the launcher, one by one.
    assert {each for each in taken - named if "/" in each} == set()


def test_architecture_maps_each_package() -> None:
    table = ARCHITECTURE.partition("\n## Map\n")[2].partition("\n## ")[0]
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for name in ("launcher", "resilience", "recipes_training")
        for path in (ROOT / name).glob("*/__init__.py")
    }

    assert packages - set(re.findall(r"`([\w/]+/)`", table)) == set()


def test_counts_of_architecture_are_those_of_the_tree() -> None:
    mutants = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text("utf-8"))
    num_mutants = sum(len(each["mutants"]) for each in mutants.values())
    num_lines = len(
        (ROOT / "tests" / "recipes_training" / "toy.py").read_text("utf-8").splitlines()
    )
    (parts,) = re.findall(r"^PARTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rows = ARCHITECTURE.partition("| part | what it holds |")[2].partition("\n\n")[0]

    (told,) = re.findall(r"lists more than (\d+) ways", ARCHITECTURE)
    assert int(told) < num_mutants <= int(told) + 100
    (told,) = re.findall(r"is a whole trainer: some (\d+) lines", ARCHITECTURE)
    assert abs(num_lines - int(told)) < 20
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == parts.split()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_no_page_says_of_now_what_is_past(page: Path) -> None:
    """Such a sentence is true on the day that it is written."""
    text = " ".join(page.read_text("utf-8").split())
    past = r"has(?: been)? run yet|has been run on GPUs|on CPUs so far|this version does not run"

    assert re.findall(past, text) == []


def test_only_the_page_on_clusters_says_which_kubernetes_is_needed() -> None:
    """So that no two places say two versions."""
    folders = [path for name in ("conf", "templates") for path in (ROOT / name).rglob("*.*")]
    places = [ROOT / "CHANGELOG.md", *PAGES, *folders]
    found = {path.stem for path in places
             if re.search(r"(?:Kubernetes|from) 1\.[23]\d\b", path.read_text("utf-8"))}  # fmt: skip

    assert found == {"clusters"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_recipe_that_a_page_shows_resolves(page: Path, tmp_path: Path) -> None:
    """Of each command in a block; other tests type the tutorial's own, and those with answers."""
    blocks = "\n".join(_blocks(page.read_text("utf-8"), "(?:sh)?")).replace("\\\n", " ")
    commands = re.findall(
        r"^(?:\S*python -m )?launcher (.*recipe=\w+/\w+ .*)$", blocks, re.MULTILINE
    )

    for command in commands:
        words = shlex.split(command.partition(" >")[0], comments=True)
        if "ours" in command or "lab/" in command or "-m" in words:
            continue
        given = [each for each in words if not each.startswith(("action=", "run.detach="))]

        ended = launch(*given, folder=tmp_path)

        assert ended.status == 0, (words, ended.err)
