"""Which sample stands at which position, and which rank takes it.

The sample at global index i of epoch e is a function of (seed, e, i) alone.
The only position is the number of samples consumed, so a run goes on with any
number of workers without a gap or a repetition. Pure; nothing here is as large
as the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from resilience.comm.sum_tree import find_share
from resilience.data.order import make_permutation


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The endless sequence of sample numbers that a run goes through."""

    num_samples: int
    seed: int

    def sample_at(self, position: int) -> int:
        """Return the sample that follows after `position` samples."""
        epoch, index = divmod(position, self.num_samples)
        return make_permutation(size=self.num_samples, seed=self.seed, epoch=epoch)(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a global batch is divided over data-parallel ranks.

    It is made of numbered micro batches, which are the same at any world size: a rank takes
    neighbours of them, as many as every other rank or one more.
    """

    global_batch_size: int
    micro_batch_size: int
    world_size: int
    first_step: int = 0
    """A step whose first sample is known."""
    first_sample: int = 0

    @property
    def num_micro_batches(self) -> int:
        """Return the micro batches of a step over all ranks."""
        return self.global_batch_size // self.micro_batch_size

    def micro_batches(self, rank: int) -> range:
        """Return the numbers, within a step, of the micro batches of one rank."""
        return find_share(self.num_micro_batches, rank=rank, world_size=self.world_size)

    def positions(self, *, step: int, micro_batch: int) -> range:
        """Return the positions of the samples of one forward and backward."""
        start = self.sample_of(step) + micro_batch * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def sample_of(self, step: int) -> int:
        """Return the position of a step's first sample."""
        return self.first_sample + (step - self.first_step) * self.global_batch_size
