"""What is typed beside a recipe: commands, options and their order, and how to quote a value."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, given
from hypothesis import strategies as st

from launcher.commands.command_line import ordered_arguments
from launcher.composition.hydra_errors import quoted_override
from tests.launcher.command import launch, refuse

TINY = "llama/llama3_tiny_pretrain"


@pytest.mark.parametrize(("arguments", "message"), [
    ([TINY], f"'{TINY}' is a recipe; choose it with recipe={TINY}\n"),
    (["mine.yaml"], "'mine.yaml' is a recipe; choose it with recipe=mine.yaml\n"),
    (["cluster=slurm", TINY], f"'{TINY}' is a recipe; choose it with recipe={TINY}\n"),
    (["llama/llama3_tiny_pretrian"], f"no command 'llama/llama3_tiny_pretrian'; closest: '{TINY}'"),
    (["lst"], "no command 'lst'; closest: 'list'\n"),
    (["shema"], "no command 'shema'; closest: 'schema'\n"),
    (["qqq"], "no command 'qqq'; allowed: list, show, explain, diff,"),
    (["completion", "csh"], "no completion for 'csh'; closest: 'zsh'\n"),
    (["completion"], "completion takes the name of a shell; allowed: bash, zsh, fish\n"),
    (["show", TINY, "run.dir=a=b"], "override 'run.dir=a=b' cannot be read; quote"),
    (["init", "slrm"], "init takes a kind of cluster, not 'slrm'; closest: 'slurm'"),
    (["init", "slurm", "k8s"], "init takes one kind of cluster, not slurm and k8s\n"),
    (["explain", "trainer.num_nodes"],
     "explain takes one recipe, as recipe=NAME; `list` shows them\n"),
    *((["list", *words], "list takes a word that the recipes have to contain")
      for words in (["a", "b"], ["--yaml"], ["--json", "--json"], ["-v"])),
    *(([command, *words], f"{command} takes a run first")
      for command in ("branch", "continue") for words in ([], ["-x"], ["trainer.max_steps=3"])),
    *((["scale", *words], "scale takes a run and nodes=N, and may be told to --wait")
      for words in ([], ["run"], ["run", "3"], ["run", "nodes=3", "--now"])),
    *((["check", *words], "check takes --update and -m 'WHY' together, WHY in one line\n")
      for words in (["--update"], ["-m", "why"], ["--update", "-m"], ["--update", "-m", "a\nb"])),
    (["check", "--all"], "check takes recipes' names, --update and -m 'WHY', not '--all'"),
    (["check", "llama/llama3_tiny"], "no recipe 'llama/llama3_tiny'; closest: "),
    (["history"], "history takes a recipe's name"),
    (["history", "llama/llama3_tiny"], "no versions of 'llama/llama3_tiny' are kept; closest"),
    (["freeze"], "freeze takes recipe=NAME and overrides"),
    (["freeze", f"recipe={TINY}", "-m"], "freeze takes recipe=NAME and overrides, and no option"),
])  # fmt: skip
def test_words_that_mean_nothing_are_told_what_they_may_be(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert refuse(tmp_path, *arguments).startswith(message)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12))
def test_an_override_that_is_quoted_as_advised_gives_the_text(value: str) -> None:
    """Typed in a shell as it stands, whatever was meant."""
    assume("${" not in value)
    (typed,) = shlex.split(quoted_override("run.dir", value))

    override = OverridesParser.create().parse_override(typed)

    assert (override.key_or_group, override.value()) == ("run.dir", value)


@pytest.mark.parametrize(("typed", "ordered"), [
    ("a=1 -m b=2", "-m a=1 b=2"),
    ("a=1 --cfg job b=2 --resolve", "--cfg job --resolve a=1 b=2"),
    ("a=1 --info", "--info all a=1"),
    ("--info a=1", "--info all a=1"),
    ("--info defaults ~c a=1", "--info defaults ~c a=1"),
    ("a=1 --cfg=hydra", "--cfg=hydra a=1"),
])  # fmt: skip
def test_options_stand_before_overrides_wherever_they_were_typed(typed: str, ordered: str) -> None:
    assert ordered_arguments(typed.split(), []) == ordered.split()


def test_an_option_between_overrides_does_what_it_does_elsewhere(tmp_path: Path) -> None:
    ended = launch(f"recipe={TINY}", "--cfg", "job", "trainer.seed=5", folder=tmp_path)
    assert ended.status == 0, ended.err
    assert "seed: 5" in ended.out


@pytest.mark.parametrize(("value", "shown"), [
    ("+env.MY_DB=hunter=2", "+env.MY_DB=(not shown)"), ("+env.A=x,hunter2", "+env.A=(not shown)"),
    ("--token=hunter2", "--token=(not shown)"), ("env.A.B={hunter2", "env.A.B=(not shown)"),
    ("cluster.secrets.A={x: hunter2", "cluster.secrets.A=(not shown)"),
])  # fmt: skip
def test_what_may_be_a_secret_is_not_repeated(tmp_path: Path, value: str, shown: str) -> None:
    said = refuse(tmp_path, f"recipe={TINY}", "cluster=slurm", value)

    assert shown in said
    assert "hunter" not in said


@pytest.mark.parametrize("advised", [
    "'+cluster.labels={example.com/a: \"b\"}'", "'+cluster.annotations={a.b/c: \"d\"}'",
    "'+cluster.node_selector={topology.kubernetes.io/zone: \"a\"}'",
    "'+cluster.affinity.required={a.b/c: [\"d\"]}'",
])  # fmt: skip
def test_what_is_advised_for_an_entry_with_a_dot_or_slash_is_taken(
    tmp_path: Path, advised: str
) -> None:
    """The advice is given for the entry as it was typed at first, and then typed itself."""
    (typed,) = shlex.split(advised)
    key, _, entry = typed.partition("=")
    name, _, value = entry.strip("{}").partition(": ")
    recipe = [f"recipe={TINY}", "cluster=k8s"]

    bare = value.strip('"[]')
    said = refuse(tmp_path, *recipe, f"{key.lstrip('+')}.{name}={bare}")
    ended = launch(*recipe, typed, folder=tmp_path)

    assert advised in said
    assert ended.status == 0, ended.err
