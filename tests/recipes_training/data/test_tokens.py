from __future__ import annotations

import numpy as np
import pytest

from recipes_training.data.tokens import Samples, check_num_samples, encode_bytes
from recipes_training.errors import DataError


def test_samples_share_one_token_with_the_next():
    samples = Samples(tokens=np.arange(11, dtype=np.uint16), seq_length=3)

    assert samples.num_samples == 3
    assert samples.read([0, 2]).tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert samples.read([1]).dtype == np.int64


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(0, 0), (1, 0), (3, 0), (4, 1), (7, 2)])
def test_number_of_samples(num_tokens, num_samples):
    samples = Samples(tokens=np.zeros(num_tokens, dtype=np.uint16), seq_length=3)

    assert samples.num_samples == num_samples


def test_bytes_end_with_the_end_token():
    assert encode_bytes(b"a\xff").tolist() == [97, 255, 256]


def test_too_few_samples_for_a_step():
    samples = Samples(tokens=np.zeros(10, dtype=np.uint16), seq_length=3)

    check_num_samples(samples, 3)
    with pytest.raises(DataError, match=r"3 samples of 3 tokens .* trainer.global_batch_size 4;"):
        check_num_samples(samples, 4)
