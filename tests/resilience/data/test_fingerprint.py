"""A changed recipe never gets an old batch: whatever changes, the digest is another."""

from __future__ import annotations

from typing import Any

import pytest

from resilience.data.fingerprint import cache_name, describe, digest
from resilience.data.sources import Source

IDENTITY = {"dataset": "s3://b/d", "tokenizer": "abc", "seed": 1, "layout": {"tp": 2, "pp": 1}}
OPTIONS: dict[str, Any] = {
    "identity": IDENTITY,
    "source": Source("loaders:make", {"path": "a", "lengths": [1, 2]}),
    "stage": "train",
    "rank": 0,
    "size": 2,
    "samples_per_batch": 8,
}


def digest_of(**changes: Any) -> bytes:
    options = {**OPTIONS, **changes}
    return digest(describe(options.pop("identity"), **options))


@pytest.mark.parametrize(
    "change",
    [
        *(
            pytest.param({"identity": {**IDENTITY, key: value}}, id=f"identity-{key}")
            for key, value in [
                ("dataset", "s3://b/e"),
                ("tokenizer", "abd"),
                ("seed", 2),
                ("seed", 1.0),
                ("seed", "1"),
                ("seed", True),
                ("seed", None),
                ("layout", {"tp": 1, "pp": 2}),
                ("sequence_length", 1),
            ]
        ),
        pytest.param({"identity": {}}, id="no-identity"),
        pytest.param({"source": Source("loaders:other", OPTIONS["source"].arguments)}, id="name"),
        pytest.param({"source": Source("loaders:make", {"path": "a"})}, id="left-out"),
        pytest.param(
            {"source": Source("loaders:make", {"path": "a", "lengths": [2, 1]})}, id="order"
        ),
        pytest.param({"stage": "val"}, id="stage"),
        pytest.param({"rank": 1}, id="position"),
        pytest.param({"size": 3}, id="positions"),
        pytest.param({"samples_per_batch": 9}, id="batch-size"),
        pytest.param({"version": 0}, id="version"),
    ],
)
def test_anything_that_changes_gives_another_digest(change: dict[str, Any]) -> None:
    assert digest_of(**change) != digest_of()


def test_the_order_of_keys_does_not_matter() -> None:
    turned = {key: IDENTITY[key] for key in reversed(IDENTITY)}
    source = Source("loaders:make", {"lengths": (1, 2), "path": "a"})

    assert digest_of(identity=turned, source=source) == digest_of()
    assert len(digest_of()) == 32


def test_the_digest_stays_what_it_was() -> None:
    """A change here throws away the caches of all older versions."""
    assert digest_of().hex()[:16] == "8536d80733a00a92"


def test_a_cache_is_named_after_its_position_and_digest() -> None:
    name = cache_name("text", stage="val", rank=3, size=16)

    assert name == f"val-3of16-{digest('text').hex()[:16]}"


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({1: "x"}, r"identity\['identity'\] has the key 1; want text"),
        ({"a": [0, {"b": float("nan")}]}, r"identity\['identity'\]\['a'\]\[1\]\['b'\] is nan"),
        ({"a": b"x"}, r"\['a'\] is a bytes; want what JSON holds"),
        ({"a": {1, 2}}, r"\['a'\] is a set; want what JSON holds"),
    ],
)
def test_an_identity_that_json_cannot_hold_is_refused(
    identity: dict[Any, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        digest_of(identity=identity)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "position 2 of 2 does not exist; want 0 to 1"),
        ({"samples_per_batch": 0}, "0 samples a batch is not allowed; want 1 or more"),
    ],
)
def test_a_position_that_does_not_exist_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        digest_of(**change)
