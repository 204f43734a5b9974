"""The command `plan`: a screen, JSON, what is wrong with its input, and what its page tells."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from launcher.paths import shipped_folder
from launcher.plan.devices import read_device
from launcher.plan.plan import make_plan
from launcher.plan.text import plan_text
from tests.launcher.command import launch, refuse
from tests.launcher.shipped import TRAINED, shipped_job

LARGE = "recipe=llama/llama3_70b_pretrain_checkpointless"
TINY = "recipe=llama/llama3_tiny_tiered"
PAGE = (shipped_folder() / "docs" / "plan.md").read_text("utf-8")
LINES_MAX, COLUMNS_MAX = 25, 160


def planned(folder: Path, *arguments: str) -> str:
    ended = launch("plan", *arguments, folder=folder)
    assert ended.status == 0, ended.err
    assert ended.err == ""
    assert list(folder.iterdir()) == []
    return ended.out


@pytest.mark.parametrize("recipe", TRAINED)
def test_a_plan_is_one_screen(recipe: str) -> None:
    job = shipped_job(recipe, "local")
    plan = make_plan(job, read_device(job.instance), 0.4)
    for is_explained, width in ((False, 100), (True, COLUMNS_MAX)):
        lines = plan_text(plan, is_explained=is_explained).splitlines()
        assert len(lines) <= LINES_MAX
        assert max(map(len, lines)) <= width


def test_every_line_is_explained_by_a_formula_and_where_it_is_written(tmp_path: Path) -> None:
    lines = planned(tmp_path, LARGE, "--explain").splitlines()

    figures = [line for line in lines if line.startswith("  ")]
    assert len(figures) == 19
    for line in figures:
        assert re.fullmatch(r"  \S.*?  +[\d,.]+( GiB| s)?  (= |of )\S.* \[\S.*\]", line), line
    text = "\n".join(lines)
    assert "= 2,270,756,864 values x 2 bytes [recipes_training/megatron/plan.py]" in text
    assert "6 x 70,553,706,496 parameters x tokens / (128 x 9.894e+14 FLOP/s x 0.4)" in text


def test_a_machine_without_devices_has_no_figures_of_them(tmp_path: Path) -> None:
    text = planned(tmp_path, TINY)
    content = json.loads(planned(tmp_path, TINY, "--json"))

    for word in ("device", "activations", "weights", "days", "mfu"):
        assert word not in text
    assert content["parameters"] == 660_352
    assert not {"device", "device_fit", "mfu", "ends_in_time"} & content.keys()
    assert content["time"].keys() == {"steps", "tokens"}


def test_json_has_bytes_and_verdicts(tmp_path: Path) -> None:
    content = json.loads(planned(tmp_path, LARGE, "--json"))

    assert content["device"]["weights"] == 2 * 2_270_756_864
    parts = [content["device"][name] for name in ("weights", "gradients", "optimizer",
                                                  "activations")]  # fmt: skip
    assert content["device"]["together"] == sum(parts)
    assert content["device_fit"] == content["node_fit"] == "fits"
    assert 118 < content["time"]["days"] < 119
    assert (content["limit_days"], content["mfu"], content["ends_in_time"]) == (6, 0.4, False)
    explained = json.loads(planned(tmp_path, LARGE, "--json", "--explain"))
    weights = explained["device"]["weights"]
    assert weights.keys() == {"value", "unit", "formula", "source"}
    assert weights["value"] == content["device"]["weights"]


@pytest.mark.parametrize(("overrides", "words"), [
    (["plan.mfu=1"], ": does not end in time, 47.4 days at plan.mfu 1 against 6 of time_limit"),
    (["trainer.max_steps=1000"], ": ends in time, 0.101 days at plan.mfu 0.4 against 6 of"),
    (["time_limit=null"], ": 118.5 days at plan.mfu 0.4, and time_limit is null"),
])  # fmt: skip
def test_time_is_held_against_the_limit(overrides: list[str], words: str, tmp_path: Path) -> None:
    assert f"\ntime{words}" in planned(tmp_path, LARGE, *overrides)


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "plan needs recipe=NAME; `list` shows them\n"),
    (["llama/llama3_8b_pretrain"],
     "'llama/llama3_8b_pretrain' is a recipe; choose it with recipe=llama/llama3_8b_pretrain\n"),
    (["recipe=llama/llama3_8b_pretrian"],
     "no recipe 'llama/llama3_8b_pretrian'; closest: 'llama/llama3_8b_pretrain'"),
    ([LARGE, LARGE], "recipe= is given twice"),
    ([LARGE, "plan.mfu=0"], "plan.mfu 0: allowed: more than 0"),
    ([LARGE, "plan.mfu=2"], "plan.mfu 2: allowed: at most 1"),
    ([LARGE, "plan.mfu=nan"], "plan.mfu "),
    ([LARGE, "plan.force=maybe"], "plan.force 'maybe': allowed: true or false"),
    ([LARGE, "plan.mfy=0.5"], "no key 'plan.mfy'; closest: 'mfu'"),
    ([LARGE, "trainer.tensor_parallel=7"], "world size 128 "),
    ([LARGE, "--multirun"], "plan has no option '--multirun'; "),
    ([LARGE, "instance=ml.p9.48xlarge"], "no instance 'ml.p9.48xlarge'; closest: "),
    (["recipe=llama/llama3_8b_pretrain,llama/llama3_70b_pretrain"], ""),
])  # fmt: skip
def test_wrong_input_is_one_message(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert refuse(tmp_path, "plan", *arguments).startswith(words)


def test_an_instance_that_the_table_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "conf" / "instance").mkdir(parents=True)
    text = "accelerator: gpu\nnum_devices: 8\nnum_efa: 32\nnum_vcpus: 192\nmemory_gib: 2048\n"
    (tmp_path / "conf" / "instance" / "p5.48xlarge.yaml").write_text(f"type: p5.48xlarge\n{text}")

    assert refuse(tmp_path, "plan", LARGE, "instance=p5.48xlarge").startswith(
        "instance.type 'p5.48xlarge' has no devices in launcher/plan/devices.yaml; closest: "
        "'ml.p5.48xlarge'"
    )


def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    commands, shown, refusal = blocks
    lines = [shlex.split(line)[4:] for line in commands.splitlines()]

    first, *others = [planned(tmp_path, *arguments) for arguments in lines]

    assert first == shown
    assert "at plan.mfu 0.5" in others[0]
    assert "8 H200 each" in others[1]
    assert json.loads(others[2])["recipe"] == "llama/llama3_tiny_tiered"
    said = refuse(
        tmp_path, "recipe=gpt_oss/gpt_oss_120b_full_checkpointless", "cluster=slurm",
        "trainer.expert_parallel=4", "cluster.checkpoint_store_url=s3://bucket/runs",
        "action=submit",
    )  # fmt: skip
    begin, _, end = " ".join(refusal.split()).partition("(...)")
    assert said.startswith(begin)
    assert said.rstrip().endswith(end)
