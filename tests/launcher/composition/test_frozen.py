"""A frozen recipe is what it was frozen from, whatever is overridden then and afterwards."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.composition.compose import resolve
from launcher.composition.frozen import frozen_text
from launcher.errors import RecipeError
from launcher.paths import shipped_folder
from launcher.versions.folder import read_lock
from launcher.versions.resolved import resolve_recipe
from tests.cases import slow
from tests.launcher.command import launch, put, refuse

RECIPES = shipped_folder() / "recipes"
LOCK = read_lock(RECIPES)
CLUSTERS = ("local", "slurm", "k8s")
OVERRIDES = (
    "trainer.max_steps=7", "trainer.global_batch_size=64", "trainer.optimizer.lr=1e-4",
    "+env.WORD='1e-3'", "run.name=another", "time_limit='1-00:00:00'", "instance=ml.p5en.48xlarge",
    "model=llama3_8b", "resilience/mmap=default", "resilience/tiered=folder",
    "resilience.tiered.store.url=folder:/ckpt", "data.seq_length=64", "resources.shm_gib=4",
    "~env.WORD",
)  # fmt: skip


def draw(seed: int) -> list[str]:
    """Return some overrides in some order."""
    source = random.Random(seed)
    return source.sample(OVERRIDES, source.choice([1, 5, 5]))


def said(recipe: str, overrides: Sequence[str]) -> str:
    """Return the job of a recipe with overrides, or why there is none."""
    try:
        return resolve(recipe, overrides).to_json()
    except RecipeError as error:
        return str(error).partition("\n")[0]


@pytest.mark.parametrize("name", sorted(LOCK))
def test_a_version_resolves_to_its_digest(name: str) -> None:
    for version in LOCK[name]:
        resolved = resolve_recipe(f"{name}@{version.version}")

        assert resolved.frozen.digest == version.digest
        assert resolved.frozen.content_sum() == version.content


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        (name, seeds) if len(seeds) == 1 else slow(name, seeds)
        for name in sorted(LOCK)
        # Without overrides, both are what recipes.lock says: another test of each holds that.
        for seeds in (range(1, 2), range(24))
    ],
)
def test_a_version_is_the_job_that_its_live_recipe_is(name: str, seeds: range) -> None:
    """With none, one and five overrides, groups among them, of which both refuse some."""
    pinned = f"{name}@{LOCK[name][-1].version}"
    for seed in seeds:
        cluster = f"cluster={CLUSTERS[seed % len(CLUSTERS)]}"
        overrides = [cluster, *draw(seed)] if seed else [cluster]

        assert said(pinned, overrides) == said(name, overrides), (seed, overrides)


def sound_overrides(name: str, seed: int) -> list[str]:
    """Return the first overrides drawn from a seed on with which a job can be made."""
    for number in itertools.count(seed, 1000):
        drawn = [each for each in draw(number) if not each.startswith("~")]
        with contextlib.suppress(RecipeError):
            resolve_recipe(name, drawn)
            return drawn
    raise AssertionError


@pytest.mark.parametrize("seed", [*range(3), *map(slow, range(3, 20))])
def test_what_was_frozen_with_overrides_takes_further_ones(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    name = source.choice([each for each in sorted(LOCK) if "tiny" in each])
    before, after = sound_overrides(name, 100 + seed), draw(200 + seed)
    resolved = resolve_recipe(name, before)
    path = tmp_path / "ours.yaml"
    path.write_text(frozen_text(resolved.frozen))
    beside = [each for each in before if each.startswith("run.")]
    # A group is chosen once on a command line; what was chosen last holds.
    again = {each.partition("=")[0] for each in after if not each.startswith(("+", "~"))}
    both = [each for each in before if each.partition("=")[0] not in again] + after

    assert said(str(path), [*beside, *after]) == said(name, both), (name, before, after)
    assert resolve_recipe(str(path)).frozen.digest == resolved.frozen.digest


def test_a_pinned_version_stays_when_the_recipe_and_its_groups_change(tmp_path: Path) -> None:
    for name in ("conf/trainer", "recipes"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "conf/trainer/ours.yaml").write_text(
        "defaults: [torch, _self_]\noptimizer: {lr: 0.25}\n"
    )
    recipe = tmp_path / "recipes" / "mine.yaml"
    recipe.write_text(
        "# @package _global_\ndefaults:\n- llama/llama3_tiny_pretrain\n"
        "- override /trainer: ours\n- _self_\n"
        "recipe:\n  name: mine\n  version: 1\ntrainer: {optimizer: {beta2: 0.5}}\n"
    )
    assert launch("check", "--update", "-m", "first", "mine", folder=tmp_path).status == 0
    before = resolve("mine", start=tmp_path).to_json()

    (tmp_path / "conf/trainer/ours.yaml").write_text(
        "defaults: [torch, _self_]\noptimizer: {lr: 0.5}\n"
    )
    recipe.write_text(recipe.read_text().replace("beta2: 0.5", "beta2: 0.75"))

    assert resolve("mine", start=tmp_path).to_json() != before
    assert resolve("mine@1", start=tmp_path).to_json() == before
    assert resolve("mine@1", ["trainer=ours"], tmp_path).to_json() == before


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("llama/llama3_tiny_pretrain@7", "no version '7' of recipe 'llama/llama3_tiny_pretrain';"),
        ("llama/llama3_tiny_pretrain@", "no version '' of recipe"),
        ("llama/llama3_tyny_pretrain@1", "closest: 'llama/llama3_tiny_pretrain'"),
        ("../x@1", "no recipe '../x@1'"),
        ("_frozen", "no recipe '_frozen'"),
        (".versions/llama/llama3_tiny_pretrain", "is outside the folders of recipes"),
    ],
)
def test_a_version_that_is_none_is_refused(tmp_path: Path, recipe: str, message: str) -> None:
    assert message in refuse(tmp_path, f"recipe={recipe}")


def test_a_sweep_over_versions_is_refused(tmp_path: Path) -> None:
    pinned = "llama/llama3_tiny_pretrain@1"

    assert "a sweep takes live recipes" in refuse(tmp_path, "-m", f"recipe={pinned},{pinned}")


@pytest.fixture(scope="module")
def kept_recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of recipes with a version that is kept."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [llama/llama3_tiny_pretrain]\n"
        "recipe:\n  name: mine\n  version: 1\n"
    )
    assert launch("check", "--update", "-m", "first", "mine", folder=folder).status == 0
    return folder / "recipes"


def spoil(tmp_path: Path, recipes: Path, old: str, new: str) -> str:
    """Return what is said to a version whose frozen file was changed."""
    shutil.copytree(recipes, tmp_path / "recipes")
    kept = tmp_path / "recipes" / ".versions" / "mine@1.yaml"
    text = kept.read_text()
    assert old in text
    kept.write_text(text.replace(old, new))
    return refuse(tmp_path, "recipe=mine@1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_steps: 200", "max_steps: 20", "mine@1.yaml was changed since it was frozen"),
        ("# frozen mine@1 ", "# frozen mine@1 f", "mine@1.yaml has the digest f"),
        ("# frozen mine@1 ", "# frozen mine@1 x", "does not begin with '# frozen NAME@VERSION"),
        ("# frozen mine@1", "# frozen mine@2", "mine@1.yaml is that of mine@2"),
        ("overrides: []", "overrides: [", "mine@1.yaml, line "),
        ("overrides: []", "overrides: {}", "overrides: allowed: a list of KEY=VALUE"),
        ("files:", "filed:", "allowed are the keys overrides and files, both"),
        ("recipe/_frozen:", "recipe/frozen:", "was changed since it was frozen"),
        ("overrides: []", "overrides: &a [*a]", "so that it would hold itself"),
    ],
)
def test_a_frozen_file_that_is_not_as_it_was_is_named_and_not_used(
    tmp_path: Path, kept_recipes: Path, old: str, new: str, message: str
) -> None:
    assert message in spoil(tmp_path, kept_recipes, old, new)


def test_copy_of_a_version_that_was_changed_can_be_used(tmp_path: Path, kept_recipes: Path) -> None:
    message = spoil(tmp_path, kept_recipes, "max_steps: 200", "max_steps: 20")
    assert "copy it without its line '# content', and choose the copy as recipe=" in message

    lines = (tmp_path / "recipes/.versions/mine@1.yaml").read_text().splitlines(keepends=True)
    (tmp_path / "copy.yaml").write_text("".join(e for e in lines if not e.startswith("# content")))
    assert launch("recipe=copy.yaml", "run.dir=run", folder=tmp_path).status == 0

    assert '"max_steps": 20,' in (tmp_path / "run/job.json").read_text()


# ---- what was once wrong


def freeze(folder: Path, name: str, *words: str) -> Path:
    ended = launch("freeze", *words, folder=folder)
    assert ended.status == 0, ended.err
    path = folder / name
    path.write_text(ended.out)
    return path


TINY = "recipe=llama/llama3_tiny_pretrain"


def test_what_is_frozen_again_keeps_its_overrides(tmp_path: Path) -> None:
    first = freeze(tmp_path, "a.yaml", TINY, "trainer.max_steps=7", "instance=ml.p5.48xlarge")
    again = freeze(tmp_path, "b.yaml", "recipe=a.yaml")

    assert again.read_text() == first.read_text()


def test_what_is_frozen_with_a_further_folder_of_groups_needs_it_no_more(tmp_path: Path) -> None:
    further = tmp_path / "further"
    put(further / "model/bigger.yaml", "defaults: [llama3_tiny, _self_]\nnum_layers: 5\n")
    freeze(tmp_path, "f.yaml", TINY, "model=bigger", f"hydra.searchpath=[file://{further}]")
    shutil.rmtree(further)

    ended = launch("recipe=f.yaml", "run.dir=run", folder=tmp_path)

    assert ended.status == 0, ended.err
    assert '"num_layers": 5' in (tmp_path / "run" / "job.json").read_text()


def test_an_override_wins_wherever_it_stands_on_the_command_line(tmp_path: Path) -> None:
    freeze(tmp_path, "f.yaml", TINY, "trainer.seed=5")
    words = ["trainer.seed=6", "recipe=f.yaml"]
    for number, each in enumerate((words, reversed(words))):
        ended = launch(*each, f"run.dir=run-{number}", folder=tmp_path)
        assert ended.status == 0, ended.err
        assert '"seed": 6' in (tmp_path / f"run-{number}" / "job.json").read_text()


def test_a_frozen_file_says_nothing_of_how_it_is_run(tmp_path: Path) -> None:
    path = freeze(tmp_path, "f.yaml", TINY)
    head, _, body = path.read_text().split("\n", 2)
    for word in ("action=run", "recipe=other", "--help", "run.name=x", "~cluster"):
        path.write_text(f"{head}\n{body.replace('overrides: []', f'overrides: [{word!r}]')}")
        assert "overrides: allowed: a list of KEY=VALUE" in refuse(tmp_path, "recipe=f.yaml"), word


@pytest.mark.parametrize("value", ["${run.name}", "x-${cluster.kind}", "${action}"])
def test_a_value_may_refer_to_the_run_and_its_cluster(tmp_path: Path, value: str) -> None:
    ended = launch(TINY, f"+env.WORD='{value}'", "run.name=foo", folder=tmp_path)

    assert ended.status == 0, ended.err
    assert not resolve_recipe("llama/llama3_tiny_pretrain", [f"+env.WORD='{value}'"]).values["env"]
