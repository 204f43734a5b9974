"""What all rows of the checkpoint benchmark share: ranks, their state, and what time is.

Runs in any of the virtual environments: it imports nothing but torch and xxhash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

TIMEOUT = timedelta(minutes=5)
SHARES = (1, 256, 1, 64, 64, 16, 1, 4096, 1024, 1024, 2048, 1, 512, 2048, 512, 1)
"""Sizes of tensors side by side, as in a transformer: vectors, projections, embeddings."""
WORDS = (torch.float32, torch.float32, torch.bfloat16)
SLEEP = 3.0
"""How long a device works elsewhere in a step, in times of a clone."""

PAUSE_S = 0.01
"""How often a process looks for what others do."""

State = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What all processes of a row know."""

    folder: Path
    """Own to the row, on tmpfs."""
    mib_per_rank: int = 512
    num_tensors: int = 128
    num_ranks: int = 4
    laps: int = 5
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What a row is told of its own, such as an address."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the state of all ranks."""
        return self.num_ranks * self.mib_per_rank << 20


def write_plan(plan: Plan) -> str:
    """Return a plan as a word of a command line."""
    return json.dumps({**dataclasses.asdict(plan), "folder": str(plan.folder)})


def read_plan(text: str) -> Plan:
    """Read it back."""
    content = json.loads(text)
    return Plan(**{**content, "folder": Path(content["folder"])})


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """When a rank began and ended, by the clock that all processes share."""

    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """Return how long this rank took by itself."""
        return self.ended_s - self.began_s


class Ranks:
    """One rank's view of the others."""

    def __init__(self, plan: Plan, rank: int, name: str) -> None:
        self.plan = plan
        self.rank = rank
        dist.init_process_group(
            "gloo",
            init_method=f"file://{plan.folder / name}",
            rank=rank,
            world_size=plan.num_ranks,
            timeout=TIMEOUT,
        )

    def barrier(self) -> None:
        """Wait for all."""
        dist.barrier()

    def run(self, work: Callable[[], object]) -> Timed:
        """Do something in all ranks at once."""
        dist.barrier()
        began_s = time.monotonic()
        work()
        return Timed(began_s, time.monotonic())

    def span_s(self, timed: Timed) -> float:
        """Return the time from the first rank's begin to the last rank's end, in all ranks."""
        return self.most(timed.ended_s) - -self.most(-timed.began_s)

    def most(self, value: float) -> float:
        """Return the largest value of all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())


RunRank = Callable[[Plan, int, Ranks], None]
"""What a process of a rank does."""


class Figures:
    """Seconds by name, one value a lap; the first lap warms up and does not count."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._values: dict[str, list[float]] = {}
        self.is_counting = False

    def span(self, name: str, timed: Timed) -> float:
        """Note the time of all ranks; returns it."""
        return self.note(name, self._ranks.span_s(timed))

    def slowest(self, name: str, seconds: float) -> float:
        """Note the time of the slowest rank; returns it."""
        return self.note(name, self._ranks.most(seconds))

    def note(self, name: str, value: float) -> float:
        """Note a value that all ranks have."""
        if self.is_counting:
            self._values.setdefault(name, []).append(value)
        return value

    def write(self) -> None:
        """Leave the figures for who started the row; for rank 0 alone."""
        if self._ranks.rank == 0:
            path = self._ranks.plan.folder / "figures.json"
            path.write_text(json.dumps(self._values))


def run_laps(
    plan: Plan, rank: int, lap: Callable[[int, Figures], None], ranks: Ranks, *, first_step: int = 1
) -> None:
    """Run a warm-up and the laps, and leave the figures."""
    figures, began_s = Figures(ranks), time.monotonic()
    for number in range(plan.laps + 1):
        figures.is_counting = number > 0
        lap(first_step + number, figures)
        if rank == 0:
            show(f"lap {number} of {plan.laps}, {time.monotonic() - began_s:.0f} s")
    figures.write()


def shapes(plan: Plan) -> list[tuple[torch.dtype, int]]:
    """Return type and size in bytes of each tensor of a rank; sizes are whole cache lines."""
    shares = [SHARES[number % len(SHARES)] for number in range(plan.num_tensors)]
    unit = (plan.mib_per_rank << 20) // sum(shares) // 64 * 64
    sizes = [share * unit for share in shares]
    sizes[sizes.index(max(sizes))] += (plan.mib_per_rank << 20) - sum(sizes)
    return [(WORDS[number % len(WORDS)], size) for number, size in enumerate(sizes)]


def make_state(plan: Plan, rank: int) -> State:
    """Return this rank's own tensors: random bytes, other ones in each rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    state = {}
    for number, (dtype, size) in enumerate(shapes(plan)):
        # Without numbers that are none, which some libraries may not bring back bit by bit.
        words = torch.empty(size // 4, dtype=torch.int32).random_(generator=generator)
        state[name_tensor(rank, number)] = words.bitwise_and_(0x3F7F3F7F).view(dtype)
    return state


def make_room(plan: Plan, rank: int) -> State:
    """Return touched memory for this rank's tensors."""
    room = {
        name_tensor(rank, number): torch.empty(size // dtype.itemsize, dtype=dtype)
        for number, (dtype, size) in enumerate(shapes(plan))
    }
    clear(room)
    return room


def name_tensor(rank: int, number: int) -> str:
    """Return a name that no other rank has."""
    return f"rank{rank}.layer{number:03}"


def change(state: State, step: int) -> None:
    """Make another state of it: each tensor says which step it is of."""
    for each in state.values():
        each.view(torch.int16)[:2] = step % 1000


def copy_into(targets: State, state: State) -> None:
    """Copy as a clone does, into memory that is there."""
    for name, each in state.items():
        targets[name].copy_(each)


def clear(targets: State) -> None:
    """Forget what was restored."""
    for each in targets.values():
        each.zero_()


def check_equal(state: State, restored: State) -> None:
    """End the benchmark where bits are wrong."""
    for name, each in state.items():
        if not torch.equal(each.view(torch.int16), restored[name].view(torch.int16)):
            raise SystemExit(f"{name} was not restored bit by bit")


def digest(state: State) -> str:
    """Return what is equal for equal states."""
    whole = xxhash.xxh3_128()
    for name, each in sorted(state.items()):
        whole.update(name.encode())
        whole.update(each.view(torch.int16).numpy().data)
    return whole.hexdigest()


def fork(run: Callable[[], None]) -> int:
    """Run a function in a process of its own; returns its pid."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            run()
            status = 0
        except SystemExit as error:
            show(str(error))
        except BaseException:  # noqa: BLE001 - a forked child must not go on as its parent
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child


def join(children: Sequence[int]) -> None:
    """Wait for processes; the benchmark ends where one failed, and with it the others."""
    left = set(children)
    while left:
        child, status = os.waitpid(-1, 0)
        if child not in left:
            continue
        left.remove(child)
        if code := os.waitstatus_to_exitcode(status):
            end(left)
            raise SystemExit(f"a process of the benchmark ended with {code}")


def end(children: Iterable[int]) -> None:
    """Kill processes and wait for their end."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def check_alive(children: Sequence[int]) -> None:
    """End the benchmark where a process has ended."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    if any(os.waitid(os.P_PID, child, flags) for child in children):
        join(children)
        raise SystemExit("the ranks ended too early")


def wait_file(path: Path, children: Sequence[int]) -> None:
    """Block until there is a file; the benchmark ends where a process ends before."""
    with until(path.name, TIMEOUT.total_seconds()) as pause:
        while not path.exists():
            check_alive(children)
            pause()


def start_ranks(plan: Plan, name: str, run: RunRank) -> list[int]:
    """Start a function in all ranks, each a process of its own with one thread."""

    def run_one(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(plan.num_ranks))
        ranks = Ranks(plan, rank, name)
        run(plan, rank, ranks)
        ranks.barrier()
        dist.destroy_process_group()

    # Else a collection within a measured call copies what a child shares with its parent.
    gc.freeze()
    return [fork(functools.partial(run_one, rank)) for rank in range(plan.num_ranks)]


def run_ranks(plan: Plan, name: str, run: RunRank) -> None:
    """Run a function in all ranks to its end."""
    children = start_ranks(plan, name, run)
    try:
        join(children)
    except BaseException:
        end(children)
        raise


def show(text: str) -> None:
    """Tell whoever waits how far it is."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def until(what: str, seconds: float) -> Iterator[Callable[[], None]]:
    """Give a function that pauses, and ends the benchmark after so many seconds."""
    end_s = time.monotonic() + seconds

    def pause() -> None:
        if time.monotonic() > end_s:
            raise SystemExit(f"{what} did not come within {seconds:.0f} s")
        time.sleep(PAUSE_S)

    yield pause
