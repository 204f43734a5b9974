"""Other values for keys of a job with which a run goes on."""

from __future__ import annotations

import pytest

from launcher.composition.changing import ChangedJob, change_job
from launcher.errors import RecipeError
from launcher.job import Job
from tests.launcher.script_job import script_job
from tests.launcher.shipped import shipped_job
from tests.recipes_training.jobs import LLAMA, MEGATRON, make_job

JOB = shipped_job("llama/llama3_tiny_tiered", "local", ["trainer.max_steps=60"])


def change(*overrides: str, job: Job = JOB) -> ChangedJob:
    return change_job(job, overrides, hint="start another run")


def refusal(*overrides: str, job: Job = JOB) -> str:
    with pytest.raises(RecipeError) as caught:
        change(*overrides, job=job)
    return str(caught.value)


def test_a_run_goes_on_with_its_own_job() -> None:
    assert change() == ChangedJob(job=JOB, told=())


def test_what_training_makes_otherwise_is_told() -> None:
    changed = change("trainer.optimizer.lr=0.5", "trainer.log_every_n_steps=7")

    assert [str(each) for each in changed.told] == ["trainer.optimizer.lr: 0.003 -> 0.5"]
    assert changed.job.trainer.optimizer.lr == 0.5
    assert changed.job.trainer.log_every_n_steps == 7


def test_what_the_state_has_to_fit_is_refused_with_both_values() -> None:
    layers = JOB.model.num_layers

    text = refusal(f"model.num_layers={layers + 1}", f"model.vocab_size={JOB.model.vocab_size * 2}")

    assert text == (
        f"model.num_layers: {layers} -> {layers + 1}: no state of the run fits that\n"
        f"model.vocab_size: {JOB.model.vocab_size} -> {JOB.model.vocab_size * 2}: no state of the "
        "run fits that\n"
        "  start another run"
    )


def test_another_division_of_megatrons_state_names_what_converts_it() -> None:
    trainer = {**MEGATRON, "num_devices": 4, "tensor_parallel": 2}
    job = make_job(trainer=trainer, model={**LLAMA, "vocab_size": 260})

    text = refusal("trainer.tensor_parallel=1", "trainer.pipeline_parallel=2", job=job)

    assert text == (
        "trainer.pipeline_parallel: 1 -> 2: no state of the run fits that\n"
        "trainer.tensor_parallel: 2 -> 1: no state of the run fits that\n"
        "  start another run; python -m recipes_training.convert RUN_DIR OUT writes its weights, "
        "for model.weights=OUT"
    )


@pytest.mark.parametrize(
    ("overrides", "told", "decay_steps"),
    [
        pytest.param(
            ["trainer.max_steps=90", "trainer.schedule=keep"],
            ["trainer.max_steps: 60 -> 90", "trainer.optimizer.decay_steps: null -> 60"],
            60,
            id="keep",
        ),
        pytest.param(
            ["trainer.max_steps=90", "trainer.schedule=stretch"],
            ["trainer.max_steps: 60 -> 90", 'trainer.schedule: null -> "stretch"'],
            None,
            id="stretch",
        ),
        pytest.param(
            ["trainer.max_steps=90", "trainer.optimizer.decay_steps=80"],
            ["trainer.max_steps: 60 -> 90", "trainer.optimizer.decay_steps: null -> 80"],
            80,
            id="own",
        ),
    ],
)
def test_learning_rates_follow_another_length_only_if_it_is_said(
    overrides: list[str], told: list[str], decay_steps: int | None
) -> None:
    changed = change(*overrides)

    assert sorted(map(str, changed.told)) == told
    assert changed.job.trainer.optimizer.decay_steps == decay_steps


def test_a_length_that_learning_rates_would_follow_is_asked_about() -> None:
    text = refusal("trainer.max_steps=90")

    assert text.startswith("trainer.max_steps 60 -> 90: the learning rates decay over the whole ")
    assert "trainer.schedule=keep" in text
    assert "trainer.schedule=stretch" in text


def test_a_schedule_of_its_own_length_is_not_asked_about() -> None:
    job = change("trainer.optimizer.decay_steps=40").job

    assert [each.key for each in change("trainer.max_steps=90", job=job).told] == [
        "trainer.max_steps"
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_step=90", "no key 'trainer.max_step' in the run's job; closest: 'trainer.m"),
        ("trainer.optimizer.lr=abc", "trainer.optimizer.lr 'abc': allowed: a number"),
        ("trainer.optimizer.lr=-1", "trainer.optimizer.lr -1"),
        ("trainer.micro_batch_size=3", "trainer.global_batch_size"),
        ("trainer.schedule=longer", "trainer.schedule 'longer': allowed: keep, stretch"),
        ("trainer.schedule=keep", "trainer.schedule 'keep' has no use"),
        ("cluster=slurm", "cluster: is a section, and no group can be chosen"),
        ("recipe.name=x", "recipe.name: the run keeps its own"),
        ("name=x", "name: the run keeps its own"),
        ("~trainer", "'~trainer': write KEY=VALUE"),
        ("trainer.seed=1,2", "'trainer.seed=1,2': write KEY=VALUE"),
        ("trainer.seed=[1", "'trainer.seed=[1': "),
        ("trainer.seed.x=1", "no key 'trainer.seed.x' in the run's job"),
    ],
)
def test_a_wrong_override_is_named(override: str, words: str) -> None:
    assert words in refusal(override)


def test_open_mappings_take_new_entries() -> None:
    assert change("+env.NEW=text").job.env["NEW"] == "text"


def test_a_script_takes_new_arguments_and_another_number_of_steps() -> None:
    """Nothing of its state is known, so nothing but the kind is fixed; its words are told."""
    job = script_job(arguments={})

    changed = change("trainer.arguments.lr=3e-4", "trainer.max_steps=9", job=job)

    assert changed.job.trainer.arguments == {"lr": "3e-4"}
    assert [str(each) for each in changed.told] == [
        'trainer.arguments.lr: null -> "3e-4"',
        "trainer.max_steps: 200 -> 9",
    ]
