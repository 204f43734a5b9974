"""The order of a sum is one and the same, whoever has which terms."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilience.comm.sum_tree import Block, add_up, find_blocks, find_share, push


def add(left: str, right: str) -> str:
    """Show in which order terms were added."""
    return f"({left}+{right})"


def sum_alone(num: int) -> str:
    return add_up({Block(number, 1): str(number) for number in range(num)}, num, add)


def sum_over(num: int, ends: list[int]) -> str:
    """Return the sum of ranks that have the terms between the ends."""
    found: dict[Block, str] = {}
    for begin, end in zip([0, *ends], [*ends, num], strict=True):
        own: list[tuple[Block, str]] = []
        for number in range(begin, end):
            push(own, number, str(number), add)
        assert [block for block, _ in own] == find_blocks(range(begin, end))
        found |= dict(own)
    return add_up(found, num, add)


def test_sums_are_those_of_a_binary_tree() -> None:
    assert sum_alone(1) == "0"
    assert sum_alone(4) == "((0+1)+(2+3))"
    assert sum_alone(7) == "(((0+1)+(2+3))+((4+5)+6))"


@given(st.data(), st.integers(1, 70))
def test_order_is_the_same_however_the_terms_are_divided(data: st.DataObject, num: int) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, num), max_size=9)))

    assert sum_over(num, ends) == sum_alone(num)


@given(st.integers(1, 200), st.integers(1, 40))
def test_shares_are_all_terms_in_turn_and_nearly_alike(num: int, world_size: int) -> None:
    shares = [find_share(num, rank=rank, world_size=world_size) for rank in range(world_size)]

    assert [number for share in shares for number in share] == list(range(num))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 500), st.integers(0, 200))
def test_a_rank_has_few_blocks(begin: int, size: int) -> None:
    """Each of them is sent: some twice the logarithm at most."""
    blocks = find_blocks(range(begin, begin + size))

    assert sum(block.size for block in blocks) == size
    assert all(block.begin % block.size == 0 for block in blocks)
    assert len(blocks) <= 2 * max(1, size.bit_length())
