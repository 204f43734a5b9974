"""The entry of a Ray cluster: a few tasks on all nodes, and a step for each round."""

from __future__ import annotations

import os
import time

import ray

import resilience


@ray.remote(scheduling_strategy="SPREAD")
def work(number: int) -> tuple[str, float]:
    """Return the node's id, and a number."""
    time.sleep(0.2)
    return ray.get_runtime_context().get_node_id(), 1.0 / (1 + number)


def main() -> None:
    """Run five rounds."""
    ray.init(log_to_driver=False)
    for step in range(1, 6):
        found = ray.get([work.remote(number) for number in range(8)])
        resilience.log(step, sum(value for _, value in found) / len(found))
    print(
        f"{len({node for node, _ in found})} nodes of {os.environ['NUM_NODES']} took part",
        flush=True,
    )


if __name__ == "__main__":
    main()
