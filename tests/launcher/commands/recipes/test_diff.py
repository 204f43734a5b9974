"""`diff` shows the keys in which two recipes, files or runs differ, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.command import launch, put, refuse

TINY = "llama/llama3_tiny_pretrain"
CHECKPOINTLESS = "llama/llama3_70b_pretrain_checkpointless"


@pytest.mark.parametrize("recipe", [CHECKPOINTLESS, "llama/llama3_tiny_everything"])
def test_a_recipe_does_not_differ_from_itself(tmp_path: Path, recipe: str) -> None:
    ended = launch("diff", recipe, recipe, "--origins", folder=tmp_path)

    assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_a_recipe_differs_from_its_base_in_what_it_sets(tmp_path: Path) -> None:
    ended = launch("diff", "llama/llama3_70b_pretrain", CHECKPOINTLESS, folder=tmp_path)

    assert (ended.status, ended.err) == (1, "")
    lines = ended.out.splitlines()
    assert lines[0] == "resilience.checkpointless: null -> a section"
    assert "trainer.num_replicas: 1 -> 2" in lines
    assert f"recipe.name: 'llama/llama3_70b_pretrain' -> '{CHECKPOINTLESS}'" in lines
    others = [line for line in lines if not line.startswith("resilience.checkpointless.")]
    assert len(others) == 4
    assert "resilience.checkpointless.spares_per_node: absent -> 1" in lines


def _write_draft(folder: Path) -> str:
    (folder / "draft.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - {TINY}\n  - _self_\ntrainer:\n  seed: 7\n"
        "env:\n  A: 1\n"
    )
    return "draft.yaml"


def test_origins_are_those_of_both_sides(tmp_path: Path) -> None:
    ended = launch("diff", TINY, _write_draft(tmp_path), "--origins", folder=tmp_path)

    assert ended.status == 1
    assert ended.out == (
        "env.A: absent -> '1'\n"
        "  draft.yaml: draft.yaml, line 8\n"
        "trainer.seed: 1234 -> 7\n"
        f"  {TINY}: conf/trainer/_settings.yaml, line 7\n"
        "  draft.yaml: draft.yaml, line 6\n"
    )


def _render(folder: Path, *arguments: str) -> Path:
    """Render a run below ./runs, and return its folder."""
    ended = launch(*arguments, folder=folder)
    assert ended.status == 0, ended.err
    return Path(ended.out.splitlines()[1].strip()).parent


def test_a_run_does_not_differ_from_its_recipe_whatever_its_cluster(tmp_path: Path) -> None:
    recipe = "gpt_oss/gpt_oss_tiny_checkpointless"
    run = _render(tmp_path, f"recipe={recipe}", "cluster=slurm", "run.name=mine")

    for words in ((recipe, str(run)), ("runs/mine", recipe), ("mine", "runs/mine")):
        ended = launch("diff", *words, folder=tmp_path)

        assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_a_run_differs_from_its_recipe_in_its_overrides_alone(tmp_path: Path) -> None:
    run = _render(tmp_path, f"recipe={TINY}", "trainer.seed=9", "+env.B=2", "run.name=mine")
    lines = (run / "job.json").read_text().splitlines()
    (line,) = (number for number, each in enumerate(lines, start=1) if '"seed": 9' in each)

    ended = launch("diff", TINY, "mine", folder=tmp_path)
    told = launch("diff", TINY, "mine", "--origins", folder=tmp_path)

    assert (ended.status, ended.out) == (1, "env.B: absent -> '2'\ntrainer.seed: 1234 -> 9\n")
    assert f"  mine: runs/mine/job.json, line {line}\n" in told.out


def test_a_run_keeps_its_values_when_its_recipe_changes(tmp_path: Path) -> None:
    draft = _write_draft(tmp_path)
    _render(tmp_path, f"recipe={draft}", "run.name=mine")
    text = (tmp_path / draft).read_text()
    (tmp_path / draft).write_text(f"{text.replace('seed: 7', 'seed: 8')}run: {{detach: true}}\n")

    ended = launch("diff", "mine", draft, folder=tmp_path)

    assert (ended.status, ended.out) == (1, "trainer.seed: 7 -> 8\n")


def test_two_runs_differ_in_their_clusters_too(tmp_path: Path) -> None:
    for name, cluster in (("one", "local"), ("two", "slurm")):
        _render(tmp_path, f"recipe={TINY}", f"cluster={cluster}", f"run.name={name}")

    ended = launch("diff", "one", "two", folder=tmp_path)

    assert ended.status == 1
    assert "cluster.kind: 'local' -> 'slurm'\n" in ended.out
    assert "name: 'one' -> 'two'\n" in ended.out


def test_a_list_differs_in_its_items(tmp_path: Path) -> None:
    _write_draft(tmp_path)
    recipe = "llama/llama3_tiny_checkpointless"
    (tmp_path / "other.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - {recipe}\n  - _self_\nresilience:\n  faults:\n"
        "    injected:\n      - {kind: exception, place: forward, step: 61, rank: 1}\n"
    )

    ended = launch("diff", recipe, "other.yaml", folder=tmp_path)

    lines = ended.out.splitlines()
    assert lines[0] == "resilience.faults.injected[0].step: 60 -> 61"
    assert "resilience.faults.injected[1].kind: 'sigkill' -> absent" in lines


@pytest.mark.parametrize(("words", "message"), [
    ((TINY,), "diff takes two recipes, files or runs, and --origins"),
    ((TINY, TINY, "--origin"), "diff takes two recipes, files or runs, and --origins"),
    ((TINY, "llama/tiny_x"), "no recipe and no run 'llama/tiny_x'; closest: 'llama/llama3_tiny_"),
    ((TINY, "my_rnu"), "no recipe and no run 'my_rnu'; closest: 'my_run'"),
    ((TINY, "empty"), "folder 'empty' holds no run: it has no job.json\n"),
    ((TINY, ""), "folder '' holds no run: it has no job.json\n"),
    ((TINY, "torn"), "torn/job.json: broken JSON: "),
    ((TINY, "list"), "list/job.json is no mapping of keys to values\n"),
    ((TINY, "none.yaml"), "no recipe file 'none.yaml'; allowed: the path of a .yaml file\n"),
    ((TINY, "bad.yaml"), "bad.yaml has no line '# @package _global_'"),
])  # fmt: skip
def test_what_is_neither_recipe_nor_run_gets_one_message(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    for name, text in (("torn", '{"name": '), ("list", "[]"), ("runs/my_run", "{}")):
        put(tmp_path / name / "job.json", text)
    (tmp_path / "runs" / "my_run" / "events.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.yaml").write_text("trainer: {seed: 1}\n")

    said = refuse(tmp_path, "diff", *words)

    assert message in said
    assert len(said.splitlines()) == 1


def test_a_secret_in_a_runs_record_is_not_shown(tmp_path: Path) -> None:
    run = _render(tmp_path, f"recipe={TINY}", "run.name=mine")
    job = json.loads((run / "job.json").read_text())
    job["env"]["HF_TOKEN"] = "Tr0ub4dor"
    (run / "job.json").write_text(json.dumps(job))

    ended = launch("diff", TINY, "mine", "--origins", folder=tmp_path)

    assert ended.out.startswith("env.HF_TOKEN: absent -> (not shown)\n")
    assert "Tr0ub4dor" not in ended.out + ended.err
