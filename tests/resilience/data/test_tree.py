"""Batches as bytes: what can be stored comes back equal, the rest is refused with its place."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import OrderedDict, UserDict, namedtuple
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from resilience.data.format import layout
from resilience.data.tree import DEPTH_MAX, TreeReader, flatten

Pair = namedtuple("Pair", ["first", "second"])

DTYPES = sorted((each for each in vars(torch).values() if isinstance(each, torch.dtype)), key=str)
STORED_DTYPES = [each for each in dict.fromkeys(DTYPES) if "q" not in str(each).split(".")[1]]


def payload(batch: object) -> tuple[bytes, bytearray]:
    """Return what a producer would store."""
    description, arrays = flatten(batch)
    offsets, num_bytes = layout(each.nbytes for each in arrays)
    memory = bytearray(num_bytes)
    for offset, array in zip(offsets, arrays, strict=True):
        memory[offset : offset + array.nbytes] = array.tobytes()
    return description, memory


def store_and_build(batch: object, before: int = 0) -> Any:
    description, memory = payload(batch)
    reader = TreeReader(description)
    assert reader.num_bytes == len(memory)
    return reader.build(memoryview(bytearray(before) + memory), before)


def same(one: Any, other: Any) -> bool:
    """Say whether two batches are equal, types, order of keys and bits of numbers included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
            *(each.reshape(-1).view(torch.uint8) for each in (one, other))
        )
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and (
            one.tobytes() == other.tobytes()
        )
    return bool(one == other or (one != one and other != other))


TENSORS = st.builds(
    lambda shape, dtype: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    st.sampled_from((torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16)),
)
ARRAYS = hnp.arrays(
    st.one_of(
        hnp.scalar_dtypes().filter(lambda dtype: dtype.itemsize),
        hnp.unicode_string_dtypes(min_len=1),
        hnp.byte_string_dtypes(min_len=1),
    ),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
BATCHES = st.recursive(
    PLAIN | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(BATCHES, st.sampled_from((0, 64, 4096)))
def test_a_batch_comes_back_equal(batch: object, before: int) -> None:
    assert same(store_and_build(batch, before), batch)


@pytest.mark.parametrize("dtype", STORED_DTYPES, ids=str)
def test_every_type_of_tensor_comes_back(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some types experimental
        content = torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)
        scalar = content[1, 2]
        built = store_and_build([content, scalar, content[:0]])

    assert [(each.dtype, each.shape) for each in built] == [
        (dtype, (2, 3)),
        (dtype, ()),
        (dtype, (0, 3)),
    ]
    assert payload(built) == payload([content, scalar, content[:0]])


TURNED = [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        pytest.param(Pair(1, "a"), (1, "a"), id="namedtuple"),
        pytest.param(OrderedDict(b=1, a=2), {"b": 1, "a": 2}, id="ordered"),
        pytest.param(UserDict(a=1), {"a": 1}, id="mapping"),
        pytest.param(torch.Size([2, 3]), (2, 3), id="size"),
        pytest.param(torch.arange(6).reshape(2, 3).T, torch.tensor(TURNED), id="turned"),
        pytest.param(torch.ones(2)[::2], torch.ones(1), id="step"),
        pytest.param(torch.ones(1).expand(3), torch.ones(3), id="expanded"),
        pytest.param(torch.tensor([1j]).conj(), torch.tensor([complex(0, -1)]), id="conjugate"),
        pytest.param(np.arange(4)[::-2], np.array([3, 1]), id="negative-step"),
        pytest.param(np.arange(6).reshape(2, 3).T, np.array(TURNED), id="turned-array"),
        pytest.param(10**5000, 10**5000, id="huge"),
        pytest.param([-(2**63), 2**63 - 1, 2**63], [-(2**63), 2**63 - 1, 2**63], id="64-bits"),
    ],
)
def test_what_comes_back_in_a_plainer_form(batch: object, expected: object) -> None:
    assert same(store_and_build(batch), expected)


ONES = torch.ones(2)
MASKED = np.ma.masked_array([1], [True])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param({"a": [object()]}, r"batch\['a'\]\[0\] is a object; a batch may", id="place"),
        pytest.param([Decimal(1)], r"batch\[0\] is a decimal\.Decimal; ", id="other-type"),
        pytest.param({1: 2}, r"batch has the key 1, which is no text; ", id="key"),
        pytest.param({1, 2}, r"batch is a set; ", id="set"),
        pytest.param(np.float64(1), r"batch is a numpy\.float64; ", id="numpy-number"),
        pytest.param(np.array([None]), r"batch is a numpy\.ndarray of type object; ", id="objects"),
        pytest.param(np.zeros(2, "i4,f4"), r"batch is a numpy\.ndarray of type \[", id="record"),
        pytest.param(MASKED, r"batch is a numpy\.ma\.\S+ of type int64; ", id="mask"),
        pytest.param(ONES.to_sparse(), r"batch is a tensor of layout \S+sparse", id="sparse"),
        pytest.param(ONES.to("meta"), r"batch is a tensor on meta; move", id="device"),
        pytest.param(torch.nn.Parameter(ONES), r"batch is a torch\.nn\S+, not a plain", id="class"),
        pytest.param(ONES.clone().requires_grad_(), r"batch is a tensor that requires", id="grad"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_place(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        flatten(value)


def test_a_batch_that_holds_itself_is_refused() -> None:
    batch: list[Any] = []
    batch.append(batch)
    with pytest.raises(TypeError, match=rf"^batch\[0\].* lies more than {DEPTH_MAX} levels deep"):
        flatten(batch)


def test_tensors_and_arrays_are_views_of_the_memory() -> None:
    description, memory = payload({"a": torch.zeros(3), "b": np.zeros(2), "n": 1})
    batch = TreeReader(description).build(memoryview(memory))

    batch["a"][1] = 5
    batch["b"][0] = 7

    again = TreeReader(description).build(memoryview(memory))
    assert again["a"].tolist() == [0, 5, 0]
    assert again["b"].tolist() == [7, 0]
    assert all(each.data_ptr() % 4 == 0 for each in (batch["a"], again["a"]))


def test_tensors_keep_their_memory_alive() -> None:
    description, memory = payload(torch.arange(1000))
    tensor = TreeReader(description).build(memoryview(memory))
    del memory

    assert tensor.tolist() == list(range(1000))


def test_batches_of_one_shape_have_one_description() -> None:
    one, other = (
        flatten({"x": torch.full((2,), n), "step": n, "loss": n / 3, "last": n > 1})[0]
        for n in (1, 2)
    )
    assert one == other


def test_arrays_begin_at_multiples_of_64() -> None:
    assert layout([1, 64, 0, 65, 2]) == ([0, 64, 128, 128, 256], 258)
    assert layout([]) == ([], 0)


def change(tree: Any) -> bytes:
    return json.dumps(tree).encode()


@pytest.mark.parametrize("description", [
    b"", b"null", b"{}", b"[]", b"\xff", b"\x80\x04K\x01.", b"[" * 100_000, change(["thing"]),
    change(["value"]), change(["dict", ["a"], []]), change(["dict", 1, 2]), change(["list"]),
    change(["tensor", "int64", [-1]]), change(["tensor", "int64", ["1"]]), change(["tensor",
    "int64"]), change(["tensor", "save", [1]]), change(["tensor", "int65", [1]]), change(["array",
    "<q9", [1]]), change(["array", "O", [1]]), change(["integer", 1]), change(["bytes", "a"]),
])  # fmt: skip
def test_what_is_no_description_is_refused(description: bytes) -> None:
    with pytest.raises(ValueError, match=r"^no description of a batch"):
        TreeReader(description)


def test_a_payload_that_is_too_short_is_refused() -> None:
    description, memory = payload(torch.arange(4))
    with pytest.raises(ValueError, match=r"a payload of 32 bytes does not lie in its memory"):
        TreeReader(description).build(memoryview(memory)[1:])


def test_arrays_need_no_torch() -> None:
    program = (
        "import sys, numpy as np\n"
        "from resilience.data.tree import TreeReader, flatten\n"
        "from resilience.data import segments\n"
        "description, arrays = flatten({'a': np.arange(3), 'n': 1})\n"
        "assert TreeReader(description).num_bytes == 72\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
