from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from resilience.state.view import NamedTensor
from training.backends import tensor_file
from training.backends.tensor_file import write_tensors

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
TENSORS = {
    **{str(each): torch.arange(15).reshape(3, 5).to(each) for each in TYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "with a grad": torch.ones(3, requires_grad=True),
}


def write(path, tensors, *, on_piece=lambda: None, metadata=None):
    named = [NamedTensor(name=name, tensor=each) for name, each in tensors.items()]
    write_tensors(path, named, metadata=metadata or {}, on_piece=on_piece)


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1 << 20])
def test_library_reads_what_was_written(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", piece_bytes)
    path = tmp_path / "file"

    write(path, TENSORS, metadata={"rest": '{"a": "\u00e9"}'})

    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, each in TENSORS.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"rest": '{"a": "\u00e9"}'}


def test_writer_looks_up_before_each_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 8)
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write(tmp_path / "file", {"a": torch.arange(10)}, on_piece=look)

    header = 8 + int.from_bytes((tmp_path / "file").read_bytes()[:8], "little")
    assert (tmp_path / "file").stat().st_size == header + 2 * 8


def test_type_that_the_format_has_not_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a has type torch\.complex64, which safetensors has not"):
        write(tmp_path / "file", {"a": torch.zeros(1, dtype=torch.complex64)})
