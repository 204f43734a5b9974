"""Files that a job reads, on the machine that is to run it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.inputs import check_inputs
from tests.launcher.command import launch
from tests.launcher.script_job import script_job
from tests.launcher.shipped import shipped_job

RECIPE = "llama/llama3_tiny_pretrain"
JSONL = ("data=jsonl", "data.seq_length=128")


def check(*overrides: str) -> None:
    check_inputs(shipped_job(RECIPE, "local", overrides))


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Return a folder with all that a job may read."""
    (tmp_path / "lines.jsonl").touch()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").touch()
    (tmp_path / "tokenizer").mkdir()
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def test_job_whose_files_are_there_passes(there: Path) -> None:
    check(
        *JSONL,
        f"data.path={there}/lines.jsonl",
        f"data.tokenizer={there}/tokenizer",
        f"model.weights={there}/weights",
    )


def test_data_of_the_machine_itself_and_of_a_bucket_are_not_looked_for() -> None:
    check()
    check("data=s3_jsonl", "data.seq_length=128", "data.url=s3://bucket/p", "data.tokenizer=bytes")


FOLDER, FILE = "allowed: a folder that can be read", "allowed: a file that can be read"
MODEL = "allowed: a folder as save_pretrained leaves it"
GONE = "cannot be found: No such file or directory"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.path={}/none", f"data.path '{{}}/none' {GONE}; {FILE}"),
        ("data.path={}", f"data.path '{{}}' is a folder; {FILE}"),
        ("data.path={}/fifo", f"data.path '{{}}/fifo' is neither a file nor a folder; {FILE}"),
        (
            "data.path={}/lines.jsonl/a",
            f"data.path '{{}}/lines.jsonl/a' cannot be found: Not a directory; {FILE}",
        ),
        ("data.tokenizer={}/none", f"data.tokenizer '{{}}/none' {GONE}; {FOLDER}"),
        ("data.tokenizer={}/lines.jsonl", f"data.tokenizer '{{}}/lines.jsonl' is a file; {FOLDER}"),
        ("model.weights={}/none", f"model.weights '{{}}/none' {GONE}; {FOLDER}"),
        (
            "model.weights={}/tokenizer",
            f"model.weights '{{}}/tokenizer' has no config.json; {MODEL}",
        ),
    ],
)
def test_file_that_is_not_there_is_named(there: Path, override: str, line: str) -> None:
    given = (*JSONL, f"data.path={there}/lines.jsonl", "data.tokenizer=bytes")

    with pytest.raises(RecipeError) as refused:
        check(*given, override.format(there))

    told = f"action 'run': this machine lacks inputs:\n  {line.format(there)}"
    assert str(refused.value) == told


def test_run_without_its_files_ends_before_anything_is_written(tmp_path: Path) -> None:
    given = ("model.weights=/none", *JSONL, "data.path=/nowhere", "data.tokenizer=bytes")

    ended = launch(f"recipe={RECIPE}", "action=run", *given, folder=tmp_path)

    assert (ended.status, ended.out) == (2, "")
    assert ended.err == (
        "action 'run': this machine lacks inputs:\n"
        f"  model.weights '/none' {GONE}; {FOLDER}\n"
        f"  data.path '/nowhere' {GONE}; {FILE}\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ({}, ("trainer.entry 'examples/torch_ddp.py' in {here} {GONE}; {FILE}, as trainer.folder "
         "is null: call the launcher in the folder that the entry is named from, or set "
         "trainer.folder")),
        ({"folder": "/nowhere"}, "trainer.folder '/nowhere' {GONE}; {FOLDER}"),
        ({"entry": "no-such-program"}, ("trainer.entry 'no-such-program' is no executable here; "
         "allowed: a program on PATH, or its path")),
        ({"python": "/no/python", "entry": "-m a"}, ("trainer.python '/no/python' is no executable "
         "here; allowed: a program on PATH, or its path")),
        ({"entry": "-m json.tool"}, None),
        ({"entry": "-m beside.main"}, None),
        ({"entry": "-m nosuch.main"}, ("trainer.entry '-m nosuch.main' is no module of this "
         "Python, nor in {here}; allowed: one that is, or trainer.python")),
        ({"entry": "bash", "preload": ["nosuch"]}, None),
        ({"entry": "-m json.tool", "preload": ["nosuch.part"]}, ("trainer.preload 'nosuch.part' is "
         "no module of this Python; allowed: modules that it has, and [] for none")),
    ],
)  # fmt: skip
def test_a_script_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, str], line: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").touch()
    job = script_job(**trainer)
    if line is None:
        check_inputs(job)
        return

    with pytest.raises(RecipeError) as caught:
        check_inputs(job)

    expected = line.format(here=tmp_path, GONE=GONE, FILE=FILE, FOLDER=FOLDER)
    assert str(caught.value).splitlines()[1:] == [f"  {expected}"]
