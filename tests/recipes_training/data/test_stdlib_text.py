from __future__ import annotations

import pytest

from recipes_training.data.stdlib_text import read_stdlib_tokens


def test_text_is_the_library_in_name_order():
    tokens = read_stdlib_tokens(200_000)

    first = bytes(tokens[: tokens.tolist().index(256)].astype("uint8"))
    assert first == __import__("__future__").__loader__.get_data(__import__("__future__").__file__)


@pytest.mark.parametrize("max_bytes", [1, 1000, 100_000])
def test_text_is_at_most_as_long_as_allowed(max_bytes):
    tokens = read_stdlib_tokens(max_bytes)

    assert sum(token != 256 for token in tokens.tolist()) == max_bytes
    assert tokens[-1] == 256
    assert tokens.tolist() == read_stdlib_tokens(max_bytes).tolist()
