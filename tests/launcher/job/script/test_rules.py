"""What a job with a program of a user's may not say, and the key that each message names."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from launcher.clusters.agent import agent_command
from launcher.job import Job
from resilience.run_record import FAULTS_VARIABLE
from resilience.settings import FAULT_LIST
from tests.launcher.script_job import RECIPE, refused, script_job
from tests.launcher.shipped import rendered, shipped_job, with_values

OURS = shipped_job("llama/llama3_tiny_everything", "local").model_dump(mode="json")
SHM = {"resources__shm_gib": 1}
TIERED = OURS["resilience"]["tiered"]
RECOVERS = {
    "resilience__checkpointless": OURS["resilience"]["checkpointless"],
    "trainer__max_restarts": 0,
    **SHM,
}
RANDOM = {"seed": 1, "mean_steps_between": 9, "kinds": ["exit"], "places": ["gate"]}


def recovers() -> dict[str, Any]:
    return {name.replace("__", "."): each for name, each in RECOVERS.items()}


def faults(**values: Any) -> dict[str, Any]:
    """Return the section of one fault with these values."""
    usual = {"kind": "sigkill", "place": "gate", "step": 5, "rank": 1}
    return {"injected": [{**usual, **values}], "random": None}


@pytest.mark.parametrize("kind", ["local", "slurm", "job"])
def test_faults_reach_a_script_as_one_word_of_the_shell(kind: str) -> None:
    values = {"resilience.faults": faults(), **recovers()}
    job = Job.model_validate(with_values(script_job(kind), values))
    text = "\n".join(rendered(job).values()).replace("\\\n", " ")

    (words,) = set(re.findall(r"env +(LAUNCHER_RUN_DIR.*? )-m ", text))

    (told,) = (each for each in shlex.split(words) if each.startswith(FAULTS_VARIABLE))
    (fault,) = FAULT_LIST.validate_json(told.partition("=")[2])
    assert (fault.kind, fault.place, fault.step, fault.rank) == ("sigkill", "gate", 5, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"model": OURS["model"]}, "model.architecture 'llama' ", id="model"),
        pytest.param({"data": OURS["data"]}, "data.kind 'stdlib_text' ", id="data"),
        pytest.param({"resilience__elastic": OURS["resilience"]["elastic"], **SHM},
                     "resilience.elastic does not fit trainer.kind 'script'", id="elastic"),
        pytest.param({**RECOVERS, "resilience__faults": faults(kind="corrupt", tensor="moment")},
                     "resilience.faults.injected[0].kind 'corrupt' does not fit trainer.kind "
                     "'script', whose", id="corrupt"),
        *(
            pytest.param({**RECOVERS, "resilience__faults": faults(place=place)},
                         f"resilience.faults.injected[0].place '{place}' does not fit trainer.kind "
                         "'script', as", id=place)
            for place in ("backward", "reduction", "within_update", "settle")
        ),
        pytest.param({**RECOVERS, "resilience__faults": {"injected": [], "random": RANDOM}},
                     "resilience.faults.random does not fit trainer.kind", id="random"),
        pytest.param({**RECOVERS, "trainer__environment": "none"},
                     "trainer.environment 'none' does not fit resilience.checkpointless",
                     id="alone"),
        pytest.param({**RECOVERS, "trainer__python": "/opt/bin/python"},
                     "trainer.python '/opt/bin/python' does not fit resilience.checkpointless",
                     id="interpreter"),
        pytest.param({**RECOVERS, "trainer__entry": "accelerate"},
                     "trainer.entry 'accelerate' does not fit resilience.checkpointless",
                     id="executable"),
        pytest.param({"resilience__tiered": TIERED},
                     "resilience.tiered.ram.budget_mib null cannot be worked out", id="budget"),
        pytest.param({"trainer__entry": "accelerate launch"},
                     "trainer.entry 'accelerate launch': allowed: ", id="two-words"),
        pytest.param({"trainer__entry": "-m a-b"}, "trainer.entry '-m a-b': ", id="module"),
        pytest.param({"trainer__entry": "--lr"}, "trainer.entry '--lr': ", id="option"),
        pytest.param({"trainer__entry": "accelerate", "trainer__python": "/opt/bin/python"},
                     "trainer.python '/opt/bin/python' does not fit", id="python"),
        pytest.param({"trainer__arguments": {"a": [1, 2]}, "trainer__argument_style": "key=value"},
                     "trainer.arguments.a ['1', '2'] does not fit", id="list"),
        pytest.param({"trainer__environment": "none", "trainer__processes_per_node": 2},
                     "trainer.processes_per_node 2 does not fit", id="processes"),
        pytest.param({"trainer__num_devices": 100}, "trainer.num_devices 100 is", id="devices"),
        pytest.param({"trainer__arguments": {"api_key": "abc123def"}},
                     "trainer.arguments.api_key holds a value (not shown)", id="secret-by-name"),
        pytest.param({"trainer__arguments": ["--token", "abc123def"]},
                     "trainer.arguments looks like a secret (not shown)", id="secret-in-words"),
        pytest.param({"trainer__progress": "lightening"},
                     "trainer.progress 'lightening' is none of lightning, megatron, ", id="name"),
        pytest.param({"trainer__progress": ["transformers", "(a+)+(?P<step>.)"]},
                     "trainer.progress '(a+)+(?P<step>.)' has a repeat within", id="pattern"),
        pytest.param({"env": {"RANK": "1"}}, "env.RANK is a variable of", id="variable"),
    ],
)  # fmt: skip
def test_a_script_is_refused_what_needs_a_trainer_of_ours(
    values: dict[str, Any], message: str
) -> None:
    """With one message, which says what is allowed."""
    found = refused(**values)

    assert len(found) == 1
    assert found[0].startswith(message)
    assert "allowed" in found[0] or "choose another" in found[0] or "more than" in found[0]


def test_a_script_may_have_a_daemon_of_a_size_that_its_recipe_says() -> None:
    budget = {**TIERED, "ram": {**TIERED["ram"], "budget_mib": 64}}
    content = script_job().model_dump(mode="json", by_alias=True)
    content["resilience"]["tiered"] = budget

    job = type(script_job()).model_validate(content)

    assert job.memoryd
    assert job.training is None


def test_processes_of_a_node() -> None:
    """As many as the devices, but for one that starts the others."""
    assert script_job().trainer.world_size == 4
    assert script_job(processes_per_node=3).trainer.world_size == 6
    assert script_job(environment="none").trainer.world_size == 2


def test_a_trainer_of_ours_needs_a_model_and_data() -> None:
    content = shipped_job("llama/llama3_tiny_pretrain", "local").model_dump(
        mode="json", by_alias=True
    )
    del content["model"]
    content["data"] = None

    with pytest.raises(ValueError, match=r"no value for 'model'.*\n.*no value for 'data'"):
        type(shipped_job(RECIPE, "local")).model_validate(content)


def test_a_script_may_recover_within_a_step() -> None:
    """With one count of restarts: that of all workers is refused."""
    job = Job.model_validate(with_values(shipped_job(RECIPE, "local"), recovers()))

    words = agent_command(
        job, python="python", rdzv_endpoint="a:1", rdzv_id="r", node="n", token_file="t"
    )
    # A spare waits at the program's begin: its set-up needs a rank.
    assert "--warm=program" not in words
    (found,) = refused(**{**RECOVERS, "trainer__max_restarts": 3})
    assert found.startswith("trainer.max_restarts 3 and resilience.checkpointless")
