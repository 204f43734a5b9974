"""Values come out of a rendered text as what they were, whatever they hold."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.errors import RecipeError
from launcher.templates import fill_template, read_templates

SHELL = {"a.j2": "printf %s {{ value | sh }}\n"}
YAML = {"a.j2": "a: {{ value | json }}\n"}
# No program can be given NUL, and nothing can write half of a surrogate pair.
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(text)
@example("a\n#SBATCH --hold\n")
@example("\r\n#SBATCH")
@example("'\"`id`$(id)${HOME}{{ x }}\\")
@settings(max_examples=60)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_reads_a_value_back_as_it_was(shell: str, value: str) -> None:
    script = fill_template(SHELL, "a.j2", {"value": value})

    said = subprocess.run([shell, "-c", script], capture_output=True, check=True, timeout=10)

    assert said.stdout == value.encode()
    assert "\r" not in script
    assert not any(line.startswith("#") for line in script.split("\n"))


@given(text)
@example("\U0001f600\x85\u2028\ufeff")
def test_yaml_reads_a_value_back_as_it_was(value: str) -> None:
    document = fill_template(YAML, "a.j2", {"value": value})

    assert yaml.load(document, yaml.CSafeLoader) == {"a": value}
    assert yaml.safe_load(document) == {"a": value}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nosuch | sh }}", "template a.j2: 'nosuch' is undefined"),
        ("{{ value }", "template a.j2, line 1: unexpected '}'"),
        ("{{ 1 / 0 }}", "template a.j2: division by zero"),
        ("{{ value | nosuch }}", "template a.j2, line 1: No filter named 'nosuch'."),
    ],
)
def test_a_template_that_fails_is_named(template: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        fill_template({"a.j2": template}, "a.j2", {"value": 1})

    assert str(error.value) == message


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "slurm" / "a.j2"
    path.parent.mkdir()
    path.write_bytes(b"\xe9")

    assert read_templates([tmp_path], "k8s") == {}
    with pytest.raises(RecipeError, match=str(path)):
        read_templates([tmp_path], "slurm")
