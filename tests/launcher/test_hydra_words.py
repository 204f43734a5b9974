"""Rendering a foreign recipe runs no code: Hydra calls what a file names below hydra."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from launcher.errors import RecipeError
from launcher.hydra_words import check_hydra_words
from launcher.sweep import SweepFolder
from launcher.written.overrides import keep_text
from tests.launcher.command import launch, refuse

TINY = "llama/llama3_tiny_pretrain"
MINE = f"# @package _global_\ndefaults:\n  - {TINY}\n  - _self_\n"
CALL = "{_target_: os.mkdir, path: CANARY}"
LOGGING = "{version: 1, handlers: {x: {(): os.mkdir, path: CANARY}}, root: {handlers: [x]}}"
FROZEN = "# frozen mine@1 " + 64 * "0" + "\noverrides: OVERRIDES\nfiles:\n  recipe/_frozen:\n"


def frozen(content: str, overrides: str = "[]", package: str = "_global_") -> str:
    """Return a frozen recipe that includes ours and has more content."""
    head = FROZEN.replace("OVERRIDES", overrides)
    own = f"{{defaults: [/recipe/{TINY}@_global_, _self_], {content}}}"
    return f"{head}    package: {package}\n    content: {own}\n"


RUNS = {
    "callbacks": ({"mine.yaml": f"{MINE}hydra:\n  callbacks: {{x: {CALL}}}\n"}, "line 6: "),
    "job_logging": (
        {"mine.yaml": f"{MINE}hydra:\n  mode: RUN\n  job_logging: {LOGGING}\n"}, "line 7: "),
    "escaped": ({"mine.yaml": f'{MINE}"\\x68ydra": {{callbacks: {{x: {CALL}}}}}\n'}, "line 5: "),
    "included": (
        {"mine.yaml": "# @package _global_\ndefaults: [/recipe/part, _self_]\n",
         "recipes/part.yaml": f"{MINE}hydra: {{callbacks: {{x: {CALL}}}}}\n"}, "line 5: "),
    "package-of-a-part": (
        {"mine.yaml": f"{MINE.replace('  - _self_', '  - _part')}",
         "recipes/_part.yaml": f"# @package hydra.callbacks\nx: {CALL}\n"}, "line 1: "),
    "package-of-an-entry": (
        {"mine.yaml": MINE.replace("  - _self_", "  - /words@hydra.callbacks: x"),
         "conf/words/x.yaml": f"x: {CALL}\n"}, "line 4: "),
    "a-team's-group": (
        {"mine.yaml": MINE.replace("  - _self_", "  - /hydra/callbacks/x"),
         "conf/hydra/callbacks/x.yaml": f"x: {CALL}\n"}, "line 1: hydra/callbacks/x among Hydra's"),
    "a-group-in-the-root": (
        {"mine.yaml": MINE + "model: {vocab_size: 512}\n",
         "conf/cluster/local.yaml":
             f"# @package _global_\nhydra: {{callbacks: {{x: {CALL}}}}}\n"}, "line 2: "),
    "parameter-of-a-sweep": (
        {"mine.yaml": f"{MINE}hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
                      f"      +hydra.job_logging: '{LOGGING.replace('()', 'a')}'\n"}, "line 9: "),
    "frozen": ({"mine.yaml": frozen(f"hydra: {{callbacks: {{x: {CALL}}}}}")}, "line 6: "),
    "frozen-override": (
        {"mine.yaml": frozen("a: 1", "['+words@hydra.callbacks=x']"),
         "conf/words/x.yaml": f"x: {CALL}\n"}, "overrides: "),
    "frozen-package": ({"mine.yaml": frozen(f"x: {CALL}", package="hydra.callbacks")}, "files."),
    "frozen-root": (
        {"mine.yaml": frozen("a: 1") + f"  launcher:\n    content: {{hydra: {{a: {CALL}}}}}\n"},
        "files.launcher"),
    "action": ({"mine.yaml": f"{MINE}action: run\n"}, "action 'run' stands in a file"),
    "action-of-a-sweep": (
        {"mine.yaml": f"{MINE}hydra:\n  mode: MULTIRUN\n  sweeper: {{params: {{action: run}}}}\n"},
        "action 'run' stands in a file"),
    "frozen-override-of-the-machine": (
        {"mine.yaml": frozen("a: 1", "['model=${oc.env:PATH}']")}, "overrides: "),
    "a-group-chosen-by-the-machine": (
        {"mine.yaml": MINE.replace("  - _self_", "  - /ours: x"),
         "conf/ours/x.yaml": "defaults: [{/model: '${oc.env:PATH}'}]\n"}, "line 1: "),
    "run-dir-elsewhere": ({"mine.yaml": f"{MINE}run: {{dir: CANARY/../..}}\n"}, "run.dir '"),
    "run-dir-of-the-machine": (
        {"mine.yaml": f"{MINE}run: {{dir: 'a${{oc.env:PATH}}'}}\n"},
        "run.dir 'a${oc.env:PATH}' stands in a file"),
    "template": (
        {"mine.yaml": MINE, "templates/local/node.sh.j2":
         "{{ ''.__class__.__base__.__subclasses__() and cycler.__init__.__globals__.os.mkdir"
         "('CANARY') }}"}, "template local/node.sh.j2: "),
    "template-with-a-secret": (
        {"mine.yaml": MINE, "templates/local/node.sh.j2": f"export A=hf_{'c' * 30}"},
        "node-0.sh would hold a secret of a template's"),
    "group-elsewhere": (
        {"mine.yaml": MINE.replace("  - _self_", "  - /../theirs/x"), "conf/README": "",
         "theirs/x.yaml": "# @package _global_\nenv: {A: b}\n"},
        "../theirs/x leads out of the folder of groups"),
}  # fmt: skip


_UNPLACED = (
    "action", "action-of-a-sweep", "template", "template-with-a-secret", "run-dir-of-the-machine",
)  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_rendering_a_foreign_recipe_runs_nothing(tmp_path: Path, case: str) -> None:
    files, told = RUNS[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("CANARY", str(tmp_path / "canary")))

    words = [] if case.startswith("run-dir") else ["run.dir=out"]
    said = refuse(tmp_path, "recipe=mine.yaml", *words)

    assert told in said
    assert str(tmp_path) in said or case in _UNPLACED


@pytest.mark.parametrize("text", [
    "hydra: x", "hydra: [callbacks]", "hydra: {launcher: x}", "hydra: {searchpath: ['pkg://x']}",
    "hydra: {run: {dir: /}}", "hydra: {job: {env_set: {PATH: /x}}}", 'hydra: {mode: "${x}"}',
    'hydra: {sweep: "${x}"}', 'hydra: {sweeper: "${x}"}', 'hydra: {sweeper: {params: "${x}"}}',
    "hydra: {sweeper: {_target_: x, params: {}}}", "hydra: {sweeper: {params: {'a@hydra': x}}}",
    "defaults: [{override /hydra/launcher: x}]", "defaults: [{/a@_global_.hydra: x}]",
    "defaults: [{/hydra/callbacks: [x]}]", "defaults: ['/a@hydra.callbacks']",
    "# @package a\u2028# @package hydra\na: 1",
    "hydra: {sweep: {dir: /tmp}}", "hydra: {sweep: {dir: ../a}}", "hydra: {sweep: {dir: link/a}}",
    "hydra: {sweep: {dir: '${oc.env:HOME}'}}", "hydra: {sweep: {dir: 'a/${now:%Y}'}}",
    "hydra: {sweep: {dir: null, subdir: a}}", "hydra: {sweep: {subdir: '${hydra.job.num}'}}",
    "hydra: {sweep: {mode: 777}}", "hydra: {sweeper: {params: {+env.X: '${oc.env:HOME}'}}}",
    "hydra: {sweeper: {params: {model: '\\${oc.env:HOME}'}}}",
    "hydra: {sweeper: {params: {env.X: 1.10}}}", "hydra: {sweeper: {params: {+env.X: '1.10,a'}}}",
    "hydra: {sweeper: {params: {+ours@env: vars}}}",
])  # fmt: skip
def test_each_word_for_hydra_is_refused_with_its_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("/tmp")
    told = r"^mine, line \d: .*; allowed in a file: hydra\.mode"
    with pytest.raises(RecipeError, match=told):
        check_hydra_words(OmegaConf.create(text), "mine", f"\n{text}")


_PARAMS = "{trainer.seed: '1,2', +env.X: \"'1.10',a\", +env.Y: a@b}"


@pytest.mark.parametrize("text", [
    f"hydra: {{mode: MULTIRUN, sweep: {{dir: a/b}}, sweeper: {{params: {_PARAMS}}}}}",
    "defaults: [a, _self_, {/model: '${trainer}'}, {/env: vars}, x@_global_, {/a@b.c: d}]",
])  # fmt: skip
def test_a_sweep_and_entries_that_name_their_files_are_taken(text: str) -> None:
    check_hydra_words(OmegaConf.create(text), "mine", text)


@pytest.mark.parametrize(("text", "told"), [
    ("defaults: [{override /model: '${oc.env:S3CR}'}]", "line 1: .* chooses by"),
    ("defaults: [a, 'x/${oc.env:S3CR}']", "line 1: .* chooses by"),
    ("a: 1\ndefaults:\n- /a\n- {'/a@${now:%Y}': x}", "line 4: .* chooses by"),
    (r"defaults: [{/a: '${oc.select:a,''\${oc.env:S3CR}''}'}]", "line 1: .* chooses by"),
    ("defaults: [/ours/vars@env]", "into env, whose values are texts"),
    ("defaults: [{/ours@env: vars}]", "into env, whose values are texts"),
    ("defaults: [{/ours@cluster.labels: [a, b]}]", r"into cluster\.labels, whose"),
    ("defaults: [x/_part@_global_.node_selector]", r"into _global_\.node_selector, whose"),
    ("# @package env\ndefaults: [more@_here_]", "into env, whose values are texts"),
])  # fmt: skip
def test_an_entry_of_defaults_names_its_file_and_gives_no_texts(text: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        check_hydra_words(OmegaConf.create(text), "mine", text)


@pytest.mark.parametrize("word", ["+ours@env=vars", "ours@a:labels=x", "++a/b@x.env.y=c"])
def test_an_override_puts_no_file_into_a_section_of_texts(word: str) -> None:
    with pytest.raises(RecipeError, match=r"puts a file into \S+, whose values are texts"):
        keep_text(word)


def multirun_file(folder: Path, kind: str) -> Path:
    """Put something else where Hydra writes a sweep's config, and return its path."""
    file, victim = folder / "a" / "multirun.yaml", folder / "victim"
    file.parent.mkdir()
    if kind != "dangling":
        victim.write_text("theirs")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "second-name":
        os.link(victim, file)
    else:
        file.symlink_to(victim)
    return file


def sweep_config(folder: Path, *task: str, **params: str) -> DictConfig:
    hydra = {"sweep": {"dir": folder}, "sweeper": {"params": params}, "overrides": {"task": task}}
    return OmegaConf.create({"hydra": hydra})


@pytest.mark.parametrize("task", [
    ["a=range(1,1e9)"], ["a=shuffle(range(1,5000))"], ["a=range(0,1,1e-4)"], ["a=range(0,9,0)"],
    ["a=range(1,102)", "b=1,2,3,4,5,6,7,8,9,10"], ["a=range(0,inf)"], ["a=range(0,nan)"],
])  # fmt: skip
def test_a_sweep_of_very_many_jobs_is_refused_before_they_are_listed(
    tmp_path: Path, task: list[str]
) -> None:
    first, *others = task
    for config in (
        sweep_config(tmp_path, *task),
        sweep_config(tmp_path, *others, a=first.removeprefix("a=")),
    ):
        with pytest.raises(RecipeError, match=r"^the sweep has \S+ jobs; allowed: at most 1000$"):
            SweepFolder().on_multirun_start(config)
    # The command line has precedence over the file.
    SweepFolder().on_multirun_start(sweep_config(tmp_path, "a=range(0,1000)", a=first[2:]))


def test_a_sweep_without_a_job_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)

    said = launch("-m", "recipe=mine.yaml", "model=glob(nosuch*)", folder=tmp_path)

    told = "the sweep has no job: one of its keys has no value to take\n"
    assert (said.status, said.err) == (2, told)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_sweep_writes_into_nothing_but_a_plain_file(tmp_path: Path, kind: str) -> None:
    file = multirun_file(tmp_path, kind)

    with pytest.raises(RecipeError, match="is no plain file, and a sweep writes to it; remove it"):
        SweepFolder().on_multirun_start(sweep_config(file.parent))

    assert os.path.lexists(file)


def test_a_sweep_replaces_the_file_that_has_another_name_elsewhere(tmp_path: Path) -> None:
    file = multirun_file(tmp_path, "second-name")

    SweepFolder().on_multirun_start(sweep_config(file.parent))

    assert not file.exists()
    assert (tmp_path / "victim").read_text() == "theirs"


def test_a_sweep_from_a_file_waits_for_no_pipe(tmp_path: Path) -> None:
    file = multirun_file(tmp_path, "pipe")
    sweep = "hydra: {mode: MULTIRUN, sweep: {dir: a}, sweeper: {params: {trainer.seed: '1,2'}}}"
    (tmp_path / "mine.yaml").write_text(f"{MINE}{sweep}\n")

    said = launch("recipe=mine.yaml", folder=tmp_path)

    assert said.status == 2
    assert said.err == f"{file} is no plain file, and a sweep writes to it; remove it\n"
    assert list(file.parent.iterdir()) == [file]
