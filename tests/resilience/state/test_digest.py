from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from resilience.state import digest
from resilience.state.digest import describe_layout, digest_state
from tests.resilience.state.nodes import PlainView
from tests.resilience.state.programs import TINY_TENSORS, odd_tensors


def digest_of(*values: Tensor) -> str:
    return digest_state(PlainView(values))


def test_digest_is_xxh3_of_layout_and_bytes() -> None:
    values = [torch.arange(5.0), torch.tensor([1, 2], dtype=torch.bfloat16), torch.empty(0)]
    layout = b'[["t0","torch.float32",[5]],["t1","torch.bfloat16",[2]],["t2","torch.float32",[0]]]'
    data = np.arange(5, dtype=np.float32).tobytes() + b"\x80\x3f\x00\x40"

    assert describe_layout(PlainView(values).tensors()) == layout
    assert digest_of(*values) == xxhash.xxh3_128_hexdigest(layout + data)


UNLIKE = [
    number
    for number, each in enumerate(odd_tensors(0))
    if each.numel() and number not in TINY_TENSORS[1:]
]


@pytest.mark.parametrize("number", UNLIKE)
def test_one_bit_of_any_tensor_changes_the_digest(number: int) -> None:
    values, changed = odd_tensors(0), odd_tensors(0)
    one = torch.zeros(changed[number].shape, dtype=torch.bool)
    one.view(-1)[-1] = True
    changed[number].copy_(torch.where(one, changed[number] == 0, changed[number]))

    assert digest_of(*values) == digest_of(*odd_tensors(0))
    assert digest_of(*values) != digest_of(*changed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(torch.zeros(2, 3), torch.zeros(3, 2), id="shape"),
        pytest.param(torch.zeros(2), torch.zeros(2, dtype=torch.int32), id="type"),
    ],
)
def test_digest_sees_what_bytes_do_not_show(one: Tensor, other: Tensor) -> None:
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.arange(600.0).reshape(20, 30).t(), id="transposed"),
        pytest.param(torch.arange(600.0).reshape(20, 30)[::3, 1:20], id="with-gaps"),
        pytest.param(torch.arange(4800.0).reshape(2, 3, 20, 40).transpose(1, 3), id="long-rows"),
        pytest.param(torch.zeros(1).expand(100), id="expanded"),
    ],
)
def test_strides_do_not_change_the_digest(value: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", 512)

    assert digest_of(value) == digest_of(value.clone(memory_format=torch.contiguous_format))


def test_rest_is_not_part_of_the_digest() -> None:
    assert digest_state(PlainView([], {"lr": 1})) == digest_state(PlainView([], {"lr": 2}))
