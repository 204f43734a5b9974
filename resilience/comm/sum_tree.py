"""One order for a sum of numbered terms, whoever has computed which of them. Pure.

Floating-point sums depend on their order. Here it is that of one binary tree over the terms 0 to
num - 1: block (begin, size), whose size is a power of two that divides its begin, is the sum of its
two halves, and a half that begins behind the last term is left out. A rank that has neighbouring
terms adds up the largest blocks of the tree within them; all these blocks, added up in the tree's
order, are the same sum for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Term = TypeVar("Term")
Add = Callable[[Term, Term], Term]
"""Returns the sum of a left and a right term; it may take their place."""


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """Neighbouring terms that are added up before anything else is."""

    begin: int
    size: int


def find_share(num: int, *, rank: int, world_size: int) -> range:
    """Return the neighbouring terms of one rank; ranks have as many as each other, or one more."""
    return range(rank * num // world_size, (rank + 1) * num // world_size)


def find_blocks(terms: range) -> list[Block]:
    """Return the largest blocks that make up neighbouring terms, in their order."""
    found = []
    begin = terms.start
    while begin < terms.stop:
        size = begin & -begin or 1 << (terms.stop - 1).bit_length()
        while begin + size > terms.stop:
            size >>= 1
        found.append(Block(begin, size))
        begin += size
    return found


def push(blocks: list[tuple[Block, Term]], number: int, term: Term, add: Add[Term]) -> None:
    """Take one more term into the blocks of a rank, whose terms come in their order."""
    block = Block(number, 1)
    while blocks and blocks[-1][0] == Block(block.begin - block.size, block.size):
        before = blocks[-1][0]
        if before.begin % (2 * block.size):
            break
        term = add(blocks.pop()[1], term)
        block = Block(before.begin, 2 * block.size)
    blocks.append((block, term))


def add_up(blocks: Mapping[Block, Term], num: int, add: Add[Term]) -> Term:
    """Return the sum of all `num` terms; raises KeyError where the blocks lack one of them."""

    def sum_of(block: Block) -> Term:
        if block in blocks:
            return blocks[block]
        if block.size == 1:
            raise KeyError(block)
        half = block.size // 2
        left = sum_of(Block(block.begin, half))
        if block.begin + half >= num:
            return left
        return add(left, sum_of(Block(block.begin + half, half)))

    return sum_of(Block(0, 1 << (num - 1).bit_length()))
