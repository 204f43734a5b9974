"""gloo's part in a recovery, by the size of the run; a part of `benchmarks.scale`.

The opening of a group of n ranks costs a rank base + peer x (n - 1) + byte x bytes of addresses
read, in seconds of a processor. That is fitted to openings on this machine, whose groups are over
all ranks and meet in an agent's store. Simulated ranks have a core each, and a network without
limits.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.generation import measure_ours
from resilience.comm.leaders import find_groups
from resilience.comm.messages import StoreReply, decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooCost:
    """What one group costs a rank, by the number of its ranks."""

    base_s: float
    peer_s: float
    byte_s: float
    address_bytes: tuple[float, float]
    """Of one rank's address: in each group, and more for each rank of the group."""

    def count_bytes(self, num_ranks: int) -> float:
        """Return the bytes of addresses that a rank reads."""
        fixed, more = self.address_bytes
        return num_ranks * (fixed + more * num_ranks)

    def open_s(self, num_ranks: int) -> float:
        """Return a rank's seconds in the opening."""
        peers_s = self.peer_s * (num_ranks - 1)
        return self.base_s + peers_s + self.byte_s * self.count_bytes(num_ranks)

    def open_leaders_s(self, num_ranks: int, num_local_ranks: int) -> float:
        """Return the seconds of rank 0, which is in most groups."""
        groups = find_groups(0, world_size=num_ranks, num_local_ranks=num_local_ranks)
        return sum(self.open_s(len(each)) for each in groups)


def time_byte_s() -> float:
    """Return what a byte of a value costs: its reply is encoded once and decoded once."""
    values = tuple("x" * 900 for _ in range(128))
    reply = StoreReply(generation=1, number=1, worker=1, values=values)
    begun_s = time.process_time()
    for _ in range(200):
        decode(encode(reply))
    # A value has four bytes of base64 for three.
    return (time.process_time() - begun_s) / 200 / sum(map(len, values)) * 4 / 3


def fit_gloo(sizes: list[int], num_times: int) -> GlooCost:
    """Measure openings of these sizes, print them beside the fit, and return it."""
    byte_s, measured = time_byte_s(), []
    for ranks in sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows = [each for one in measure_ours(ranks, num_times, Path(folder)) for each in one]
        names = ("cpu_s", "sockets", "bytes")
        measured.append([statistics.median(each[name] for each in rows) for name in names])
    cpu_s, sockets, num_bytes = np.array(measured).T
    counts = np.array(sizes, dtype=float)
    lines = np.stack([np.ones_like(counts), counts], axis=1)
    (base_s, peer_s), *_ = np.linalg.lstsq(lines, cpu_s - byte_s * num_bytes, rcond=None)
    address, *_ = np.linalg.lstsq(lines, num_bytes / counts, rcond=None)
    cost = GlooCost(
        base_s=max(0.0, float(base_s + peer_s)),
        peer_s=float(peer_s),
        byte_s=byte_s,
        address_bytes=(float(address[0]), float(address[1])),
    )
    for ranks, spent_s, num_sockets, read in zip(sizes, cpu_s, sockets, num_bytes, strict=True):
        print(
            f"{ranks:5d} ranks  sockets of a rank {num_sockets:3.0f}  addresses "
            f"{read / 1e3:5.1f} kB (fit {cost.count_bytes(ranks) / 1e3:.1f})  processor of a rank "
            f"{1000 * spent_s:5.1f} ms (fit {1000 * cost.open_s(ranks):.1f})"
        )
    print(
        f"fit: {1000 * cost.base_s:.2f} ms a group, {1000 * peer_s:.3f} ms a peer, "
        f"{1e9 * byte_s:.1f} ns a byte, {address[0]:.0f} + {address[1]:.1f} x ranks bytes each"
    )
    return cost


COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#7f7f7f")


def draw(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Return an SVG of seconds by ranks, both axes logarithmic."""
    points = [point for curve in curves.values() for point in curve]
    ranks, seconds = zip(*points, strict=True)
    left, right = np.log10(min(ranks)), np.log10(max(ranks))
    low, high = np.floor(np.log10(min(seconds))), np.ceil(np.log10(max(seconds)))

    def place(num_ranks: float, each_s: float) -> tuple[float, float]:
        x = 60 + 400 * (np.log10(num_ranks) - left) / (right - left)
        return round(x, 1), round(260 - 240 * (np.log10(each_s) - low) / (high - low), 1)

    parts = ['<rect width="640" height="300" fill="white"/>']
    for power in range(int(low), int(high) + 1):
        x, y = place(min(ranks), 10.0**power)
        parts.append(f'<path d="M{x} {y}h400" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g} s</text>')
    for number in sorted({*ranks}):
        x, y = place(number, 10.0**low)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{number}</text>')
    parts.append('<text x="260" y="296" text-anchor="middle">ranks, 8 on a node</text>')
    label = 0.0
    by_height = sorted(curves.items(), key=lambda each: -each[1][-1][1])
    for (name, curve), colour in zip(by_height, COLOURS, strict=True):
        line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in curve))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = place(*curve[-1])
        label = max(label + 15, y)
        parts.append(f'<text x="{x + 6}" y="{label + 4}" fill="{colour}">{name}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" '
    return head + 'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"
