from __future__ import annotations

import json
import os

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from launcher.job.workload import Jsonl
from recipes_training.data.jsonl import map_token_file, open_encoder, token_file, write_token_file
from recipes_training.errors import DataError


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines: str, tokenizer: str = "bytes") -> Jsonl:
        path = tmp_path / "text.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        return Jsonl(
            kind="jsonl", seq_length=4, path=str(path), text_key="text", tokenizer=tokenizer
        )

    return write_lines


@pytest.fixture
def tokenizer_folder(tmp_path):
    words = {"hello": 0, "world": 1, "<unk>": 2, "<end>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def _tokens(data: Jsonl, folder) -> list[int]:
    encode, _ = open_encoder(data.tokenizer)
    path = token_file(data, folder)
    write_token_file(data, path, node="n", encode=encode)
    return map_token_file(path).tolist()


def test_documents_are_packed_with_an_end_token_after_each(write, tmp_path):
    data = write('{"text": "ab"}', "", '{"text": "\\u00e9", "other": 1}', '{"text": ""}')

    assert _tokens(data, tmp_path) == [97, 98, 256, 0xC3, 0xA9, 256, 256]


def test_more_documents_than_one_call_takes(write, tmp_path):
    data = write(*(json.dumps({"text": str(number)}) for number in range(1000)))

    tokens = np.array(_tokens(data, tmp_path))

    assert (tokens == 256).sum() == 1000
    assert bytes(tokens[tokens != 256].astype("uint8")) == "".join(map(str, range(1000))).encode()


def test_tokens_are_mapped_not_read(write, tmp_path):
    data = write('{"text": "ab"}')
    _tokens(data, tmp_path)

    assert isinstance(map_token_file(token_file(data, tmp_path)), np.memmap)
    assert not list(tmp_path.glob("*.unfinished"))


def test_hugging_face_tokenizer(write, tmp_path, tokenizer_folder):
    data = write('{"text": "hello world"}', '{"text": "what"}', tokenizer=str(tokenizer_folder))

    assert open_encoder(str(tokenizer_folder))[1] == 4
    assert _tokens(data, tmp_path) == [0, 1, 3, 2, 3]


def test_a_document_that_spells_a_special_token_is_text(write, tmp_path, tokenizer_folder):
    data = write('{"text": "hello <end> world <unk>"}', tokenizer=str(tokenizer_folder))

    tokens = _tokens(data, tmp_path)

    assert tokens.count(3) == 1, tokens
    assert (tokens[0], tokens[-1]) == (0, 3)


def test_half_of_a_surrogate_pair_is_named_where_a_tokenizer_takes_none(
    write, tmp_path, tokenizer_folder
):
    line = '{"text": "a\\ud800"}'
    assert _tokens(write(line), tmp_path) == [97, 0xED, 0xA0, 0x80, 256]

    with pytest.raises(DataError, match="line 2 holds half of a surrogate pair"):
        _tokens(write('{"text": "a"}', line, tokenizer=str(tokenizer_folder)), tmp_path)


def test_file_of_tokens_is_another_for_other_text_or_options(write, tmp_path):
    data = write('{"text": "ab"}')
    first = token_file(data, tmp_path)
    same = token_file(data.model_copy(update={"seq_length": 8}), tmp_path)
    key = token_file(data.model_copy(update={"text_key": "body"}), tmp_path)
    tokenizer = token_file(data.model_copy(update={"tokenizer": "/x"}), tmp_path)
    os.utime(data.path, (1, 1))

    assert same == first
    assert len({first, key, tokenizer, token_file(data, tmp_path)}) == 4


def test_file_of_tokens_is_another_for_a_changed_tokenizer(write, tmp_path, tokenizer_folder):
    data = write('{"text": "ab"}', tokenizer=str(tokenizer_folder))
    first = token_file(data, tmp_path)
    os.utime(tokenizer_folder / "tokenizer.json", (1, 1))

    assert token_file(data, tmp_path) != first


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        pytest.param("{", "line 2 is no JSON: ", id="no-json"),
        pytest.param('{"body": "a"}', "line 2 has no text under", id="no-key"),
        pytest.param('{"text": 1}', "line 2 has no text under", id="no-text"),
        pytest.param("[]", "line 2 has no text under", id="no-object"),
    ],
)
def test_broken_line_is_named(write, tmp_path, line, complaint):
    data = write('{"text": "a"}', line)

    with pytest.raises(DataError, match=complaint):
        _tokens(data, tmp_path)


def test_what_is_missing_is_named(write, tmp_path):
    data = write().model_copy(update={"path": "/nowhere/text.jsonl"})

    with pytest.raises(DataError, match=r"cannot read data.path /nowhere/text.jsonl: no such file"):
        token_file(data, tmp_path)
    with pytest.raises(DataError, match=r"no folder at data.tokenizer /nowhere"):
        open_encoder("/nowhere")
    with pytest.raises(DataError, match=f"data.tokenizer {tmp_path} is no tokenizer: "):
        open_encoder(str(tmp_path))
