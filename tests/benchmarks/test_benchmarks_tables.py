from __future__ import annotations

from benchmarks.peers import find_reason


def test_peer_that_is_not_installed_is_named_with_its_reason():
    text = "torchrun\tinstalled\ttorch 2.13.0\nnvrx\tmissing\tERROR: No matching distribution\n"

    assert find_reason(text, "torchrun") is None
    assert find_reason(text, "nvrx") == "not installed: ERROR: No matching distribution"
    assert "installer ended before torchft" in find_reason(text, "torchft")
