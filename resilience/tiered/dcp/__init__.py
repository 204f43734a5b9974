"""Storage for torch.distributed.checkpoint: `dcp.save`, `async_save` and `load` over the tiers.

Each rank's items are one shard, in the order of its plan, and one more holds the metadata,
written last by the coordinator: a step without it is not whole. Nothing here is pickled but
what a planner itself hands over as bytes. `resilience/tiered/attempts.py` decides under which
generation a step is saved, and which one is refused.
"""

from resilience.tiered.dcp.reader import TieredReader
from resilience.tiered.dcp.writer import TieredWriter

__all__ = ["TieredReader", "TieredWriter"]
