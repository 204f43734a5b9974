"""Rendering a foreign recipe runs no code: Hydra calls what a file names below hydra."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launcher.errors import RecipeError
from launcher.hydra_words import check_hydra_words
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
    "template": (
        {"mine.yaml": MINE, "templates/local/node.sh.j2":
         "{{ ''.__class__.__base__.__subclasses__() and cycler.__init__.__globals__.os.mkdir"
         "('CANARY') }}"}, "template local/node.sh.j2: "),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_rendering_a_foreign_recipe_runs_nothing(tmp_path: Path, case: str) -> None:
    files, told = RUNS[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("CANARY", str(tmp_path / "canary")))

    said = refuse(tmp_path, "recipe=mine.yaml", "run.dir=out")

    assert told in said
    assert str(tmp_path) in said or case in ("action", "action-of-a-sweep", "template")


@pytest.mark.parametrize("text", [
    "hydra: x", "hydra: [callbacks]", "hydra: {launcher: x}", "hydra: {searchpath: ['pkg://x']}",
    "hydra: {run: {dir: /}}", "hydra: {job: {env_set: {PATH: /x}}}", 'hydra: {mode: "${x}"}',
    'hydra: {sweep: "${x}"}', 'hydra: {sweeper: "${x}"}', 'hydra: {sweeper: {params: "${x}"}}',
    "hydra: {sweeper: {_target_: x, params: {}}}", "hydra: {sweeper: {params: {'a@hydra': x}}}",
    "defaults: [{override /hydra/launcher: x}]", "defaults: [{/a@_global_.hydra: x}]",
    "defaults: [{/hydra/callbacks: [x]}]", "defaults: ['/a@hydra.callbacks']",
    "# @package a\u2028# @package hydra\na: 1",
])  # fmt: skip
def test_each_word_for_hydra_is_refused_with_its_line(text: str) -> None:
    told = r"^mine, line \d: .*; allowed in a file: hydra\.mode"
    with pytest.raises(RecipeError, match=told):
        check_hydra_words(OmegaConf.create(text), "mine", f"\n{text}")


def test_words_for_a_sweep_are_taken() -> None:
    text = "hydra: {mode: MULTIRUN, sweep: {dir: a}, sweeper: {params: {trainer.seed: '1,2'}}}"

    check_hydra_words(OmegaConf.create(text), "mine", text)


def test_no_option_reads_what_hydra_has_pickled(tmp_path: Path) -> None:
    assert (
        "no option '--experimental-rerun"
        in launch("--experimental-rerun", "x.pickle", f"recipe={TINY}", folder=tmp_path).err
    )
