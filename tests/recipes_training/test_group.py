from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from launcher.job.workload import Jsonl
from recipes_training.coordinator import agree_on_name
from recipes_training.data.loading import announce_samples, check_same_samples, open_samples
from recipes_training.data.tokens import Samples
from recipes_training.errors import DataError, GroupError
from recipes_training.group import choose_fixed_order, go_on, wait_for_key
from recipes_training.stop import EXIT_STATUS, StopSignal
from resilience.errors import BrokenError
from tests.recipes_training.groups import make_group
from tests.recipes_training.jobs import make_job

SOON = timedelta(seconds=20)


def test_workers_of_one_start_agree_on_a_name_that_older_ones_did_not_have():
    store = HashStore()
    names = []
    # Rank 1 of the first start dies when it has asked.
    store.set("ask/1", "word of the dead")
    for _start in range(2):
        with ThreadPoolExecutor(3) as pool:
            asked = [
                pool.submit(agree_on_name, store, rank=rank, world_size=3, timeout=SOON)
                for rank in (0, 1, 2)
            ]
        names.append({each.result() for each in asked})

    assert [len(each) for each in names] == [1, 1]
    assert not names[0] & names[1]


def test_workers_that_do_not_come_are_counted():
    with pytest.raises(GroupError, match=r"1 of 2 workers met within 0:00:00"):
        agree_on_name(HashStore(), rank=0, world_size=2, timeout=timedelta(0))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        pytest.param(DataError("no text"), r"^no text$", id="ours"),
        pytest.param(KeyError(), r"^KeyError: KeyError$", id="without-text"),
    ],
)
def test_others_hear_of_any_error(error, told):
    first = make_group()
    other = make_group(rank=1, store=first.store)

    with pytest.raises(type(error)), first.meet("data", SOON), first.lead("tokens"):
        raise error

    with pytest.raises(GroupError, match=told):
        other.follow("tokens", SOON)
    with pytest.raises(GroupError, match=told), other.meet("data", SOON):
        pass


def test_sigterm_ends_a_wait():
    before = signal.getsignal(signal.SIGTERM)
    StopSignal().install()
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(SystemExit) as stopped:
            wait_for_key(HashStore(), "never", SOON, go_on)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    assert stopped.value.code == EXIT_STATUS


def test_other_samples_than_those_of_rank_0_are_refused():
    first = make_group()
    other = make_group(rank=1, store=first.store, node="node-1")
    check_same_samples(Samples(tokens=np.arange(9), seq_length=4), first)

    check_same_samples(Samples(tokens=np.arange(9), seq_length=4), other)
    with pytest.raises(
        DataError,
        match=r"the data of node-1 has 2 samples with checksum \w+, that of worker 0 has 2 ",
    ):
        check_same_samples(Samples(tokens=np.arange(9)[::-1], seq_length=4), other)


def test_wait_by_the_store_ends_with_the_generation():
    def over() -> None:
        raise BrokenError("another rank's fault")

    group = replace(make_group(rank=1), check=over)

    with pytest.raises(BrokenError, match="another rank's fault"):
        group.follow("never", timedelta(hours=1))
    with pytest.raises(BrokenError, match="another rank's fault"):
        group.first_text("never", "", timedelta(hours=1))


def test_worker_that_was_replaced_opens_data_beside_those_that_have_it(tmp_path):
    """Without the tokenizer: who has the tokens open leads without opening it again."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a long way"}\n')
    data = Jsonl(kind="jsonl", seq_length=4, path=str(text), text_key="text", tokenizer="bytes")
    model = make_job().model
    samples = open_samples(data, model, run_dir=tmp_path, group=make_group())
    first = make_group(num_local_ranks=2)
    replaced = make_group(rank=1, store=first.store, num_local_ranks=2)

    announce_samples(data, samples, first)
    found = open_samples(data, model, run_dir=tmp_path, group=replaced)
    check_same_samples(found, replaced)

    assert found.read([0]).tolist() == samples.read([0]).tolist()


def test_sums_have_one_order_and_a_kernel_without_one_is_refused(monkeypatch) -> None:
    """With warn_only attention has no order."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        choose_fixed_order()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(mode=False)
