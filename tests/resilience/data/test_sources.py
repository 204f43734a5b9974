"""What can make batches, where they begin, and which samples a position gets."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.data.errors import ProducerError
from resilience.data.sources import (
    PositionBatchSampler,
    Source,
    SourceState,
    Start,
    make_source,
    open_source,
)
from tests.resilience.data import source_functions as functions

MODULE = functions.__name__
WAIT_S = 60


def start_at(batch: int) -> Start:
    return Start(batch=batch, samples_consumed=4 * batch, rank=1, size=2, stage="train")


def read(name: str, batch: int, **arguments: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(open_source(Source(f"{MODULE}:{name}", arguments), start_at(batch)))


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        (functions.begins_there, {}),
        (functools.partial(functions.begins_there, length=3), {"length": 3}),
        (functools.partial(functools.partial(functions.begins_there, length=3), scale=2), None),
        (Source(f"{MODULE}:begins_there", {"scale": 2}), {"scale": 2}),
    ],
)
def test_functions_partials_and_sources(factory: Any, arguments: dict[str, Any] | None) -> None:
    source = make_source(factory)

    wanted = {"length": 3, "scale": 2} if arguments is None else arguments
    assert source == Source(f"{MODULE}:begins_there", wanted)


def _made_within() -> Any:
    def closure() -> list[int]:
        return []

    return closure


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: [1], "a lambda of .* cannot be a source; another process has to import it: write"),
        (_made_within(), "closure is made within another function; another process has to"),
        (functions.Counter(1, is_json=True).method, "Counter.method is no function of a module"),
        (functions.Counter(1, is_json=True), "a Counter is no function of a module"),
        (functools.wraps(functions.fails)(lambda: [1]), "fails is not what stands there"),
        (
            functools.partial(functions.begins_at_0, 3),
            r"arguments without a name; give them by name: partial\(begins_at_0, NAME=VALUE\)",
        ),
        (
            functools.partial(functions.begins_at_0, length={1}),
            r"arguments of .*:begins_at_0\['length'\] is a set; want what JSON holds",
        ),
        (
            functools.partial(functions.begins_at_0, size=1),
            "cannot be called with size: got an unexpected keyword argument 'size'",
        ),
        (functools.partial(functions.begins_there, start=3), "is given start=3; leave it out"),
    ],
)
def test_what_another_process_cannot_call_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_source(factory)


@pytest.mark.parametrize("reference", ["module", "module:a.b", ":f", "m:", "../m:f", "/m:f"])
def test_a_reference_that_leads_to_no_function_is_refused(reference: str) -> None:
    with pytest.raises(ValueError, match="want 'module:function'"):
        Source(reference)


def test_a_source_keeps_its_arguments_as_they_were() -> None:
    lengths = [1, 2]
    source = Source("m:f", {"lengths": lengths})

    lengths.append(3)

    assert source.arguments == {"lengths": [1, 2]}


def test_a_function_with_start_begins_there() -> None:
    assert read("begins_there", 7) == [7, 8, 9]
    assert read("tells_start", 7) == [start_at(7)]


@pytest.mark.parametrize("name", ["begins_at_0", "begins_at_0_again", "has_state"])
def test_any_other_function_is_brought_there(name: str) -> None:
    assert read(name, 0) == list(range(10))
    assert read(name, 7) == [7, 8, 9]
    assert read(name, 12) == []


def test_reading_what_lies_before_warns_once_and_says_how_to_avoid_it() -> None:
    with pytest.warns(RuntimeWarning, match="begins at batch 0, so 7 batches are read") as caught:
        open_source(Source(f"{MODULE}:begins_at_0"), start_at(7))

    assert len(caught) == 1
    assert "a parameter `start`" in str(caught[0].message)


@pytest.mark.parametrize(("known", "num_read"), [(5, 2), (7, 0)])
def test_a_state_of_an_earlier_batch_is_loaded(known: int, num_read: int) -> None:
    earlier = open_source(Source(f"{MODULE}:has_state"), start_at(0))
    for _ in range(known):
        next(earlier)
    state = earlier.read_state()

    opened = open_source(Source(f"{MODULE}:has_state"), start_at(7), state)

    assert state == SourceState(batch=known, state={"position": known})
    assert opened._loader.num_read == num_read
    assert (opened.next_batch, next(opened)) == (7, 7)


def test_a_state_of_a_later_batch_is_of_no_use() -> None:
    state = SourceState(batch=8, state={"position": 8})

    with pytest.warns(RuntimeWarning, match="7 batches are read and thrown away"):
        opened = open_source(Source(f"{MODULE}:has_state"), start_at(7), state)

    assert next(opened) == 7


def test_a_state_that_json_cannot_hold_is_told_of_once() -> None:
    opened = open_source(Source(f"{MODULE}:has_state", {"is_json": False}), start_at(0))

    with pytest.warns(RuntimeWarning, match=r"state of the Counter is not kept: .* is a bytes"):
        assert opened.read_state() is None
    assert opened.read_state() is None


def test_a_loader_without_a_state_has_none() -> None:
    assert open_source(Source(f"{MODULE}:begins_at_0"), start_at(0)).read_state() is None


def test_where_a_function_begins_at_any_batch_no_state_is_asked_for() -> None:
    opened = open_source(Source(f"{MODULE}:begins_there_with_state"), start_at(7))

    assert (opened.read_state(), next(opened)) == (None, 7)


def test_the_number_after_the_end_is_how_many_batches_there_are() -> None:
    opened = open_source(Source(f"{MODULE}:begins_at_0"), start_at(0))

    assert list(opened) == list(range(10))
    assert opened.next_batch == 10
    assert list(opened) == []
    opened.close()
    opened.close()


def test_an_exception_of_the_dataset_comes_as_itself() -> None:
    opened = open_source(Source(f"{MODULE}:fails"), start_at(0))

    assert list(itertools.islice(opened, 3)) == [0, 1, 2]
    with pytest.raises(KeyError, match="sample 3"):
        next(opened)
    assert opened.next_batch == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("no_such_module:f"), "cannot import no_such_module:f: No module named"),
        (Source("/no/such.py:f"), "cannot import /no/such.py:f: there is no file /no/such.py"),
        (Source(f"{MODULE}:f"), "the module has no f; want a function at the top"),
        (Source(f"{MODULE}:CONSTANT"), "CONSTANT is a int; want a function"),
        (Source(f"{MODULE}:fails", {"a": 1}), "fails.* cannot be called with a: got an unexp"),
        (Source(f"{MODULE}:returns_nothing"), "has returned a NoneType, which yields nothing"),
    ],
)
def test_a_source_that_cannot_be_opened(source: Source, message: str) -> None:
    with pytest.raises(ProducerError, match=message):
        open_source(source, start_at(0))


SCRIPT = """
from functools import partial

from resilience.data.sources import make_source

class Batch:
    pass

def make_batches(length):
    return [Batch() for _ in range(length)]

if __name__ == "__main__":
    print(make_source(partial(make_batches, length=3)).reference)
"""

OPEN = """
import sys
from resilience.data.sources import Source, Start, open_source

start = Start(batch=0, samples_consumed=0, rank=0, size=1, stage="train")
batches = list(open_source(Source(sys.argv[1], {"length": 3}), start))
print(len(batches), sys.modules["__main__"].Batch is type(batches[0]), "torch" in sys.modules)
"""


def test_a_function_of_the_script_itself_is_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    reference = run_python(str(script))

    assert reference == f"{script.resolve()}:make_batches"
    assert run_python("-c", OPEN, reference) == "3 True False"


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    return done.stdout.strip()


def samples(num_batches: int, size: int, **options: Any) -> list[int]:
    """The samples of so many batches of all positions, position by position in each."""
    samplers = [PositionBatchSampler(rank=rank, size=size, **options) for rank in range(size)]
    parts = [list(itertools.islice(sampler, num_batches)) for sampler in samplers]
    return [sample for batch in zip(*parts, strict=True) for part in batch for sample in part]


@given(
    num_samples=st.integers(1, 100),
    share=st.integers(1, 3),
    consumed=st.integers(0, 10**9),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
)
def test_the_global_order_is_the_same_for_any_number_of_positions(
    num_samples: int, share: int, consumed: int, seed: int, shuffle: bool
) -> None:
    options = {
        "num_samples": num_samples,
        "seed": seed,
        "samples_per_batch": 12 * share,
        "samples_consumed": consumed,
        "shuffle": shuffle,
    }

    alone = samples(4, 1, **options)

    for size in (2, 3, 4, 12):
        assert samples(4, size, **options) == alone


def test_a_resume_goes_on_where_it_was() -> None:
    options: dict[str, Any] = {"num_samples": 37, "seed": 5, "samples_per_batch": 4}

    whole = samples(40, 2, **options)

    for batch in (1, 9, 10, 33):
        assert (
            samples(5, 2, samples_consumed=4 * batch, **options)
            == (whole[4 * batch : 4 * batch + 20])
        )
    assert sorted(whole[:37]) == sorted(whole[37:74]) == list(range(37))
    assert whole[:37] != whole[37:74]


def test_a_resume_at_ten_million_reads_nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in computed samples, not timed."""
    indices: list[int] = []
    call = "resilience.data.order.Permutation.__call__"
    monkeypatch.setattr(call, lambda self, index: indices.append(index) or index)
    sampler = PositionBatchSampler(
        num_samples=20_000_000, seed=0, samples_per_batch=8, samples_consumed=10_000_000
    )

    assert next(iter(sampler)) == list(range(10_000_000, 10_000_008))
    assert len(indices) == 8


def test_samples_stay_what_they_were() -> None:
    """A change of the order would make runs of older versions continue elsewhere."""
    options: dict[str, Any] = {"num_samples": 1000, "seed": 1234, "samples_per_batch": 3}

    assert samples(1, 1, **options) == [194, 243, 556]


def test_it_ends_after_its_epochs_with_whole_batches() -> None:
    sampler = PositionBatchSampler(
        num_samples=10, seed=0, samples_per_batch=4, shuffle=False, num_epochs=2, rank=1, size=2
    )

    assert list(sampler) == [[2, 3], [6, 7], [0, 1], [4, 5], [8, 9]]
    assert len(sampler) == 5
    with pytest.raises(TypeError, match="without num_epochs has no end"):
        len(PositionBatchSampler(num_samples=10, seed=0, samples_per_batch=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_batch": 5, "size": 2}, "5 samples a batch do not divide by 2 positions"),
        ({"rank": 2, "size": 2}, "position 2 of 2 does not exist; want 0 to 1"),
        ({"num_samples": 0}, "0 samples, 4 a batch and 0 consumed are not allowed"),
        ({"samples_consumed": -1}, "10 samples, 4 a batch and -1 consumed are not allowed"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PositionBatchSampler(**{"num_samples": 10, "seed": 0, "samples_per_batch": 4, **options})
