"""AWS's metadata is a pickle: it is read, and nothing of it is run."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from resilience.tiered.aws_format import (
    StorageInfo,
    decode_metadata,
    decode_tensor,
)
from resilience.tiered.dcp.plain_items import check_plain
from resilience.tiered.errors import FormatError
from tests.resilience.tiered.aws_made import NUM_RANKS, dump, make_checkpoint, save

DCP = "torch.distributed.checkpoint.metadata"
FILE = "/tmp/run-by-a-pickle"


def test_a_metadata_is_what_was_saved() -> None:
    blobs = make_checkpoint()
    expected = pickle_free(blobs[-1])

    found = decode_metadata(blobs[-1])

    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.planner_data == {"rows": ("rows",), "rest": ("rest",)}
    assert found.storage_data[MetadataIndex("rows", [2, 0])] == StorageInfo(
        rank=1, offset=0, length=len(blobs[0])
    )
    assert len(found.storage_data) == NUM_RANKS + 1


def pickle_free(blob: bytes) -> Metadata:
    """Return what pickle itself makes of a metadata, with our class in place of AWS's."""

    class Ours(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return StorageInfo if module.startswith("amzn") else super().find_class(module, name)

    made = Ours(io.BytesIO(blob)).load()
    assert isinstance(made, Metadata)
    return made


class Bomb:
    """Calls something when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.called = (call, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.called


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def program(*parts: bytes) -> bytes:
    return b"\x80\x05" + b"".join(parts) + b"."


def calls(module: str, name: str, argument: bytes) -> bytes:
    return program(named(module, name), argument, b"\x85R")


TOUCH = f"touch {FILE}"
CODE = f"open({FILE!r}, 'w')"
NESTED = b")\x94" + b"".join(b"h" + bytes([each]) + b"\x86\x94" for each in range(200))
"""A tuple whose hash would take 2 ** 200 steps."""


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        pytest.param(dump(Bomb(os.system, TOUCH)), "it asks for posix.system", id="system"),
        pytest.param(dump(Bomb(eval, CODE)), "it asks for builtins.eval", id="eval"),
        pytest.param(
            dump(Bomb(getattr, str, "join")), "it asks for builtins.getattr", id="getattr"
        ),
        pytest.param(
            calls(DCP, "os.system", text(TOUCH)),
            f"it asks for {DCP}.os.system",
            id="through-an-allowed-module",
        ),
        pytest.param(
            calls("torch", "serialization.os.system", text(TOUCH)),
            "it asks for torch.serialization.os.system",
            id="through-torch",
        ),
        pytest.param(
            dump(Bomb(torch.load, FILE)), "it asks for torch.serialization.load", id="torch-load"
        ),
        pytest.param(
            calls("torch", "zeros", b"J\xff\xff\xff\x7f"),
            "it asks for torch.zeros",
            id="torch-zeros",
        ),
        pytest.param(
            calls("torch", "float32", text("x")), "a call that is none", id="calls-a-dtype"
        ),
        pytest.param(calls(DCP, "Metadata", text("x")), "a call that is none", id="calls-a-class"),
        pytest.param(
            program(named(DCP, "Metadata"), text("x"), b"\x85\x81"),
            "an object that is none",
            id="arguments-of-new",
        ),
        pytest.param(
            program(named(DCP, "Metadata"), b")\x81}", text("__class__"), b"}sb"),
            "a Metadata with '__class__'",
            id="another-class",
        ),
        pytest.param(
            program(named("torch", "Size"), b"(", text("x"), b"tR"),
            "a size that is none",
            id="size-of-text",
        ),
        pytest.param(
            calls("collections", "OrderedDict", NESTED), "no metadata", id="dict-of-pairs"
        ),
        pytest.param(b"cposix\nsystem\n(S'touch x'\ntR.", "instruction b'c'", id="protocol-0"),
        pytest.param(pickle.dumps({}, protocol=2), "a pickle of protocol 2", id="protocol-2"),
        pytest.param(b"\x80\x05\x82\x01.", r"instruction b'\\x82'", id="extension"),
        pytest.param(
            b"\x80\x05\x8e" + b"\xff" * 7 + b"\x7f.", "in a bytes8, but only 1 rem", id="huge-bytes"
        ),
        pytest.param(b"\x80\x05X\xff\xff\xff\x7fx.", "but only 2 remain", id="huge-text"),
        pytest.param(b"\x80\x05Nr\xff\xff\xff\x7f.", "instruction b'r'", id="huge-memo"),
        pytest.param(program(b"}", NESTED, b"Ns"), "a key of type tuple", id="endless-hash"),
        pytest.param(program(NESTED, text("x"), b"\x93"), "a name that is no text", id="as-name"),
        pytest.param(program(b"}"), "what is made is not", id="no-metadata"),
        pytest.param(program(named(DCP, "Metadata"), b")\x81"), "state_dict_meta", id="empty"),
        pytest.param(program(b"t"), "no metadata", id="no-group"),
        pytest.param(program(b"R"), "no metadata", id="no-stack"),
        pytest.param(b"", "exhausted before seeing STOP", id="nothing"),
        pytest.param(make_checkpoint()[-1][:-9], "no metadata", id="torn"),
        pytest.param(dump(Metadata({"a": 1})), "a tensor is not what", id="no-tensor"),  # type: ignore[dict-item]
        pytest.param(
            dump(Metadata({}, planner_data={"a": ((1,),)}, storage_data={})),
            "a path is not what",
            id="path",
        ),
        pytest.param(
            dump(Metadata({}, storage_data={MetadataIndex("a"): 1})), "a place is not", id="place"
        ),
        pytest.param(
            dump(Metadata({}, planner_data=argparse.Namespace(a=1), storage_data={})),
            "it asks for argparse.Namespace",
            id="planner",
        ),
    ],
)
def test_bombs_are_refused_and_nothing_is_run(blob: bytes, message: str) -> None:
    Path(FILE).unlink(missing_ok=True)

    with pytest.raises(FormatError, match=message) as caught:
        decode_metadata(blob)

    assert str(caught.value).startswith("no metadata of AWS's library: ")
    assert not Path(FILE).exists()


def test_what_is_too_long_is_not_looked_at() -> None:
    blob = make_checkpoint()[-1]

    with pytest.raises(FormatError, match=f"{len(blob)} bytes is longer than {len(blob) - 1}"):
        decode_metadata(blob, bytes_max=len(blob) - 1)
    assert decode_metadata(blob, bytes_max=len(blob)).storage_data


def test_an_ordered_dict_is_a_dict() -> None:
    blob = dump(Metadata(OrderedDict(), planner_data=OrderedDict(a=("a", 0)), storage_data={}))

    assert decode_metadata(blob).planner_data == {"a": ("a", 0)}


def test_items() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    zipped = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(save(tensor))) as plain,
        zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))

    assert torch.equal(decode_tensor(save(tensor)), tensor)
    check_plain(save({"a": [1, tensor]}))
    nowhere = torch.empty(9, device="meta")
    for item in (
        b"", b"x", save(Bomb(os.system, TOUCH)), save({}), save(nowhere), zipped.getvalue()
    ):  # fmt: skip
        with pytest.raises(FormatError, match=r"no plain data|of AWS's library"):
            decode_tensor(item)
    with pytest.raises(FormatError, match="no plain data"):
        check_plain(save(argparse.Namespace(a=1)))
    assert not Path(FILE).exists()


def test_a_changed_tensor_is_found_by_its_own_checksum() -> None:
    changed = bytearray(save(torch.zeros(1000)))
    changed[changed.index(bytes(4000)) + 7] ^= 1

    with pytest.raises(FormatError, match="is not what its checksum says"):
        decode_tensor(bytes(changed), checks=True)
