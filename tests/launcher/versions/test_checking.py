"""A team's recipes under `check`: what has changed is named, and kept under a new version."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest

from launcher.holding import held_folder
from launcher.paths import shipped_folder
from launcher.versions import checking
from launcher.versions import folder as kept
from launcher.versions.checking import Checker
from tests.launcher.command import Ended, launch, put, refuse
from tests.launcher.local_world import prepare

TODAY = datetime.date(2026, 3, 1)
RECIPE = """\
# @package _global_
defaults:
  - llama/llama3_tiny_pretrain
  - override /trainer: ours
  - _self_

recipe:
  name: {name}
  version: 1
  schema: 1
  description: "{name}: version: 9"

trainer:
  max_steps: 30
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A team's folder with two recipes that share a trainer, under versions of their own."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "conf/trainer").mkdir(parents=True)
    (folder / "recipes/a").mkdir(parents=True)
    (folder / "conf/trainer/ours.yaml").write_text("defaults: [torch, _self_]\nsharding: none\n")
    for name in ("a/one", "a/two"):
        (folder / f"recipes/{name}.yaml").write_text(RECIPE.format(name=name))
    ended = check(folder, "--update", "-m", "as it began")
    assert (ended.status, ended.err) == (0, "")
    return folder


@pytest.fixture
def team(tmp_path: Path, begun: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(begun, tmp_path, dirs_exist_ok=True)


def check(team: Path, *words: str) -> Ended:
    return launch("check", *words, folder=team)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_recipes_that_are_what_their_versions_say_pass(team: Path) -> None:
    ended = check(team)

    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "2 recipes as their versions say\n"
    assert check(team, "a/one").out == "1 recipe as their versions say\n"


def test_a_recipe_that_has_changed_is_named_with_its_keys(team: Path) -> None:
    change(team / "recipes/a/one.yaml", "max_steps: 30", "max_steps: 40\n  seed: 7")

    ended = check(team)

    assert (ended.status, ended.out) == (1, "")
    assert ended.err == (
        "a/one: is not what version 1 was; `check --update -m WHY` raises its version\n"
        "  trainer.max_steps: 30 -> 40\n  trainer.seed: 1234 -> 7\n"
    )
    assert check(team, "a/two").status == 0


def test_a_group_that_has_changed_is_named_for_each_recipe_of_it(team: Path) -> None:
    change(team / "conf/trainer/ours.yaml", "sharding: none", "sharding: full")

    ended = check(team)

    assert ended.status == 1
    assert ended.err.count("is not what version 1 was") == 2
    assert ended.err.count('  trainer.sharding: "none" -> "full"\n') == 2


def test_an_update_keeps_what_has_changed_under_the_next_version(team: Path) -> None:
    path = team / "recipes/a/one.yaml"
    change(path, "max_steps: 30", "max_steps: 40")
    text = path.read_text()

    ended = check(team, "--update", "-m", "longer: it had not converged")

    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "a/one is version 2 now\n2 recipes as their versions say\n"
    assert path.read_text() == text.replace("  version: 1\n", "  version: 2\n")
    assert check(team).status == 0
    lines = launch("history", "a/one", folder=team).out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["a/one@1", "a/one@2"]
    assert [line.split("  ")[3] for line in lines] == [
        "as it began",
        "longer: it had not converged",
    ]


def test_two_versions_differ_in_what_was_changed(team: Path) -> None:
    change(team / "recipes/a/one.yaml", "max_steps: 30", "max_steps: 40")
    assert check(team, "--update", "-m", "longer").status == 0

    assert launch("diff", "a/one", "a/one@2", folder=team) == Ended(0, "", "")
    differing = launch("diff", "a/one@1", "a/one@2", folder=team)

    assert differing.status == 1
    assert "trainer.max_steps" in differing.out
    assert "no version '3' of recipe" in launch("diff", "a/one@1", "a/one@3", folder=team).err


def test_a_version_that_was_raised_by_hand_is_added(team: Path) -> None:
    path = team / "recipes/a/one.yaml"
    change(path, "  version: 1\n", "  version: 5\n")

    ended = check(team)
    assert ended.status == 1
    words = "is not in recipes.lock, whose newest is"
    assert f"a/one: version 5 {words} 1; `check --update -m WHY` adds 5\n" in ended.err

    assert check(team, "--update", "-m", "by hand").out.startswith("a/one is version 5 now\n")
    assert "version: 5" in path.read_text()
    change(path, "  version: 5\n", "  version: 2\n")
    assert f"a/one: version 2 {words} 5; `check --update -m WHY` adds 6\n" in check(team).err
    assert check(team, "--update", "-m", "lower").out.startswith("a/one is version 6 now\n")


def test_a_version_that_was_taken_back_is_wrong(team: Path) -> None:
    path = team / "recipes/a/one.yaml"
    text = path.read_text()
    change(path, "max_steps: 30", "max_steps: 40")
    assert check(team, "--update", "-m", "longer").status == 0
    path.write_text(text)

    assert "a/one: is version 1, and recipes.lock has 2; " in check(team).err


def test_frozen_files_that_are_gone_or_of_nobody_are_named(team: Path) -> None:
    below = team / "recipes/.versions/a"
    (below / "one@1.yaml").rename(below / "three@1.yaml")

    ended = check(team)

    assert ended.status == 1
    lost = f"{below}/one@1.yaml is not there, and recipes.lock names it"
    assert lost in ended.err
    assert f"recipe 'a/one@1' cannot be used: {lost}" in refuse(team, "recipe=a/one@1")
    assert f"{below}/three@1.yaml: recipes.lock does not name it; get the lock back" in ended.err


def test_lost_file_of_the_version_that_a_recipe_still_is_is_written_again(team: Path) -> None:
    path = team / "recipes/.versions/a/one@1.yaml"
    text = path.read_text()
    lock = (team / "recipes/recipes.lock").read_text()
    path.unlink()
    assert check(team).status == 1

    ended = check(team, "--update", "-m", "unused")

    assert ended.status == 0
    assert ended.out.startswith("a/one has the file of version 1 again\n")
    assert path.read_text() == text
    assert (team / "recipes/recipes.lock").read_text() == lock, "it is no new version"


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_changed", [False, True])
def test_no_lock_is_begun_where_one_was_lost(team: Path, is_changed: bool) -> None:
    lock = team / "recipes/recipes.lock"
    text = lock.read_text()
    lock.unlink()
    if is_changed:
        change(team / "recipes/a/one.yaml", "max_steps: 30", "max_steps: 40")
    (team / "recipes/a/new.yaml").write_text(RECIPE.format(name="a/new"))
    before = everything(team)

    told, ended = check(team), check(team, "--update", "-m", "longer")

    assert told == ended
    assert (ended.status, ended.out) == (1, "")
    assert "a/one@1.yaml: recipes.lock does not name it; get the lock back" in ended.err
    assert everything(team) == before
    lock.write_text(text)
    assert check(team, "--update", "-m", "longer").status == 0


def test_recipe_of_a_shipped_ones_name_goes_on_with_its_numbers(team: Path) -> None:
    """NAME@1 is the shipped one before and after."""
    name = "llama/llama3_tiny_pretrain"
    shipped = (shipped_folder() / f"recipes/{name}.yaml").read_text()
    put(team / f"recipes/{name}.yaml", shipped.replace("max_steps: 200", "max_steps: 90"))

    told = check(team, name).err
    assert f"version 1 is not in recipes.lock, and {name}@1 is the recipe whose place" in told
    assert "adds 2\n" in told
    assert f"{name} is version 2 now\n" in check(team, "--update", "-m", "shorter").out

    assert check(team).status == 0
    for number, max_steps in ((1, 200), (2, 90)):
        words = (f"recipe={name}@{number}", f"run.dir=run-{number}")
        assert launch(*words, folder=team).status == 0
        assert f'"max_steps": {max_steps},' in (team / f"run-{number}/job.json").read_text()
    lines = launch("history", name, folder=team).out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"{name}@1", f"{name}@2"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_steps: 30", "max_steps: 0", "trainer.max_steps 0"),
        ("/trainer: ours", "/trainer: none_such", "none_such"),
        ("trainer:\n", "nonsense: 1\ntrainer:\n", "nonsense"),
        ("sharding: none", "sharding: hybrid\nnum_replicas: 3", "num_replicas 3"),
    ],
)
def test_recipe_of_which_no_job_can_be_made_is_not_kept(
    team: Path, old: str, new: str, message: str
) -> None:
    for path in (team / "recipes/a/one.yaml", team / "conf/trainer/ours.yaml"):
        path.write_text(path.read_text().replace(old, new))

    ended = check(team, "--update", "-m", "why")

    assert ended.status == 1
    assert ended.err.startswith("a/one: ")
    assert message in ended.err
    assert "@2" not in launch("history", "a/one", folder=team).out
    assert message in refuse(team, "freeze", "recipe=a/one")


def test_recipe_that_leaves_a_value_to_whoever_runs_it_is_kept(team: Path) -> None:
    change(team / "recipes/a/one.yaml", "max_steps: 30", "max_steps: ???")

    assert check(team, "--update", "-m", "as long as you like").status == 0


def test_a_name_that_is_not_the_path_is_wrong(team: Path) -> None:
    change(team / "recipes/a/one.yaml", "name: a/one\n", "name: a/other\n")

    assert "a/one: recipe.name is 'a/other'; allowed: 'a/one'" in check(team).err


@pytest.mark.parametrize("num_written", range(3))
def test_an_update_that_is_killed_leaves_a_lock_that_holds(
    team: Path, num_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any of its writes: the lock names nothing that is not there, and the next update ends."""

    class KilledError(Exception):
        """The process ends here."""

    written: list[Path] = []
    replace_text = kept.replace_text

    def write(path: Path, text: str, writer: str) -> None:
        if len(written) == num_written:
            raise KilledError
        written.append(path)
        replace_text(path, text, writer)

    change(team / "recipes/a/one.yaml", "max_steps: 30", "max_steps: 40")
    with monkeypatch.context() as patched:
        for module in (kept, checking):
            patched.setattr(module, "replace_text", write)
        with pytest.raises(KilledError):
            Checker(team / "recipes", team).update("a/one", "longer", TODAY)

    lock = kept.read_lock(team / "recipes")
    for name, versions in lock.items():
        for version in versions:
            assert kept.find_unfit(team / "recipes", name, version) is None
    assert launch("recipe=a/one@1", "run.dir=run", folder=team).status == 0
    assert check(team, "a/one").status == 1
    assert check(team, "--update", "-m", "longer", "a/one").out.startswith("a/one is version 2 now")
    assert check(team).status == 0


def test_the_shipped_recipes_are_what_their_versions_say(tmp_path: Path) -> None:
    ended = check(tmp_path)

    assert (ended.status, ended.err) == (0, "")


def test_rendering_notes_that_a_live_recipe_is_not_its_version(team: Path) -> None:
    """Not for what is overridden, nor for a version that was chosen."""
    note = (
        "note: a/one is not what is kept of its version 1: `check` names the keys, and "
        "recipe=a/one@1 is that version\n"
    )
    assert note not in launch("recipe=a/one", "trainer.seed=5", folder=team).err
    # Other files that say the same are no other recipe: `check` would name no key.
    change(team / "conf/trainer/ours.yaml", "sharding: none", "threads_per_worker: 1")
    assert note not in launch("recipe=a/one", "trainer.seed=5", folder=team).err
    shipped = launch("recipe=script/ray_cluster", "trainer.folder=/code", folder=team)
    assert (shipped.status, "is not what is kept" in shipped.err) == (0, False)
    change(team / "conf/trainer/ours.yaml", "threads_per_worker: 1", "sharding: full")

    assert note in launch("recipe=a/one", "trainer.seed=5", folder=team).err
    assert note not in launch("recipe=a/one@1", folder=team).err


def test_a_run_keeps_the_recipe_that_it_was_started_with(team: Path) -> None:
    words = ["trainer.max_steps=1", "run.dir=run", "data.max_bytes=100000", "model=llama3_tiny"]
    assert launch("recipe=a/one", *words, folder=team).status == 0
    rendered = (team / "run" / "job.json").read_text()
    assert not (team / "run" / "recipe.yaml").exists()
    prepare(team, "#!/bin/sh\n: {{ node }}\n")
    ended = launch("recipe=a/one", *words, "action=run", folder=team)
    assert ended.status == 0, ended.err
    told = " ".join(["launcher recipe=a/one", *words, "action=run"])
    assert told in (team / "run" / "report.html").read_text("utf-8")

    change(team / "recipes/a/one.yaml", "max_steps: 30", "max_steps: 40")
    change(team / "conf/trainer/ours.yaml", "sharding: none", "threads_per_worker: 2")
    again = launch("recipe=run/recipe.yaml", "run.dir=again", folder=team)

    assert again.status == 0, again.err
    assert (team / "again" / "job.json").read_text() == rendered


# ---- what was once wrong


def test_an_update_changes_nothing_of_what_is_shipped(team: Path) -> None:
    """Not even where a team's model makes shipped recipes other ones."""
    shipped = shipped_folder() / "recipes"
    before = {path: path.read_bytes() for path in shipped.rglob("*.yaml")}
    lock = (shipped / "recipes.lock").read_bytes()
    (team / "conf/model").mkdir()
    model = (shipped_folder() / "conf/model/llama3_tiny.yaml").read_text()
    (team / "conf/model/llama3_tiny.yaml").write_text(model + "num_layers: 2\n")
    change(team / "conf/model/llama3_tiny.yaml", "num_layers: 3\n", "")

    ended = check(team, "--update", "-m", "two layers")

    assert (ended.status, ended.out.splitlines()[:2]) == (
        0,
        ["a/one is version 2 now", "a/two is version 2 now"],
    )
    named = check(team, "--update", "-m", "two layers", "llama/llama3_tiny_pretrain")
    assert named.status == 1
    assert "  model.num_layers: 3 -> 2\n" in named.err
    assert {path: path.read_bytes() for path in shipped.rglob("*.yaml")} == before
    assert (shipped / "recipes.lock").read_bytes() == lock


@pytest.mark.parametrize(
    "head",
    [
        "recipe: {{name: a/one, version: {}}}",
        "recipe:   # who\n# at the margin\n  version: {}  # so far\n  name: a/one",
        'recipe:\n  description: >-\n    with\n    version: 1\n  "version": {}\n  name: a/one',
        "recipe:\r\n  name: a/one\r\n  version: {}\r\n",
    ],
)
def test_a_version_is_raised_wherever_it_stands(team: Path, head: str) -> None:
    path = team / "recipes/a/one.yaml"
    defaults = "# @package _global_\ndefaults: [llama/llama3_tiny_pretrain, _self_]\n"
    path.write_bytes(f"{defaults}{head.format(1)}\ntime_limit: null\n".encode())

    ended = check(team, "--update", "-m", "another trainer", "a/one")

    assert (ended.status, ended.err) == (0, "")
    assert path.read_bytes().decode() == f"{defaults}{head.format(2)}\ntime_limit: null\n"
    assert check(team, "a/one").status == 0


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("recipe: {name: a/one, version: 0x1}", "recipe.version '0x1' in "),
        ("recipe: {name: a/one}", "one.yaml does not set recipe.version itself"),
    ],
)
def test_a_version_that_cannot_be_raised_is_named_and_the_others_are(
    team: Path, head: str, message: str
) -> None:
    text = "# @package _global_\ndefaults: [llama/llama3_tiny_pretrain, _self_]\n{}\n"
    (team / "recipes/a/one.yaml").write_text(text.format(head))
    change(team / "recipes/a/two.yaml", "max_steps: 30", "max_steps: 40")

    ended = check(team, "--update", "-m", "why")

    assert (ended.status, ended.out) == (1, "a/two is version 2 now\n")
    assert message in ended.err
    assert not (team / "recipes/.versions/a/one@2.yaml").exists()


def test_two_updates_at_once_lose_nothing(team: Path) -> None:
    with held_folder(team / "recipes"):
        ended = check(team, "--update", "-m", "why")

    assert (ended.status, ended.out) == (1, "")
    assert f"another launcher or program works in {team}/recipes" in ended.err


def test_keys_and_values_that_are_no_text_break_nothing(team: Path) -> None:
    odd = "env: {1: x, true: y, B: !!binary aGVsbG8=}"
    change(team / "recipes/a/one.yaml", "\ntrainer:\n", f"\n{odd}\ntrainer:\n")

    ended = check(team)

    assert ended.status == 1
    assert "Traceback" not in ended.err
    assert "a/one: a value of the recipe is bytes; allowed: text" in ended.err
    ended = check(team, "--update", "-m", "why", "a/one")
    assert "Traceback" not in ended.err
    assert "a value of the recipe is bytes; allowed: text" in refuse(team, "recipe=a/one")


def test_a_sweep_notes_nothing_of_recipes_that_are_their_versions(team: Path) -> None:
    ended = launch("-m", "recipe=a/one,a/two", folder=team)

    assert ended.status == 0
    assert "is not what is kept" not in ended.err
