"""What one NVIDIA GPU shows of recovery: two ranks share it, through gloo with its tensors.

    python -m benchmarks.gpu [--parts fork,sticky,gate,bits,trainer,megatron]

Prints a table with the machine's name. Without a GPU every part is "not shown", with status 0;
status 1 says that a part does not hold. `--device cpu` runs what has a meaning there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import figures, machine
from benchmarks.events import Event
from benchmarks.faultbench import Limits, System, make_plan, run_folder, run_job
from benchmarks.gpu_gate import take_step
from benchmarks.gpu_recipes import RecipeRun, run_recipe
from benchmarks.jobplan import MICRO_BATCH, Fault, Kind
from benchmarks.ours import PRELOADED, start_workers
from resilience.state.report import Phase

NUM_RANKS = 2
VICTIM = 1
FAULT_STEP = 4
STALL_S = 60.0
BITS_STEPS, BITS_RUNS = 50, 3
FLAGS = {
    "none": "no flag",
    "cublas": "CUBLAS_WORKSPACE_CONFIG=:4096:8",
    "lenient": "that and use_deterministic_algorithms(True, warn_only=True)",
    "product": "that without warn_only, as the trainers have",
}
STICKY: dict[Kind, str] = {
    "assert": "a device-side assertion",
    "address": "an illegal address",
}
MEGATRON = ("llama/llama3_tiny_megatron", "gpt_oss/gpt_oss_tiny_megatron")
ALONE = (
    "trainer.tensor_parallel=1",
    "trainer.expert_parallel=1",
    "trainer.num_replicas=1",
    "resilience.checkpointless=null",
    "resilience.faults=null",
    "resilience.tiered=null",
)
LOSS_STEPS, LOSS_TOLERANCE = 5, 1e-3
TRAINER_STEPS = 40
TRAINER_FAULTS = (
    "resilience.faults.injected=[{kind:exception,place:forward,step:10,rank:1},"
    "{kind:sigkill,place:backward,step:20,rank:0}]"
)
TRAINERS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "DDP, Llama": ("llama/llama3_tiny_checkpointless", 2, ()),
    "DDP, GPT-OSS": ("gpt_oss/gpt_oss_tiny_checkpointless", 2, ()),
    "FSDP2 in 2 shards with a copy, Llama": (
        "llama/llama3_tiny_checkpointless",
        4,
        ("trainer.sharding=hybrid", "trainer.num_replicas=2"),
    ),
    "FSDP2 in 2 shards with a copy, GPT-OSS": (
        "gpt_oss/gpt_oss_tiny_checkpointless",
        4,
        ("trainer.sharding=hybrid", "trainer.num_replicas=2"),
    ),
}
"""Recipe, number of workers, each on a node of its own, and overrides."""
ATTENTION = (
    "llama/llama3_tiny_pretrain",
    "model.head_dim=64",
    "data.seq_length=512",
)
"""Of a size for which torch has fused kernels, on a GPU and in bf16."""
NO_GPU = "no GPU"
SAME_BITS = "same bits"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one part came to. `is_shown` is None where nothing could show it."""

    part: str
    what: str
    is_shown: bool | None
    seen: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RanksRun:
    """A run of the ranks: its events, and all that its processes have printed."""

    end: str
    events: tuple[Event, ...]
    log: str

    @property
    def is_finished(self) -> bool:
        """Return whether it came to its last step."""
        return self.end == "finished"


def run_ranks(
    device: str, *, num_steps: int, flags: str = "product", faults: tuple[Fault, ...] = ()
) -> RanksRun:
    """Train with two ranks on one device under an agent, whose zygote has all modules."""
    variables = {"GPU_BENCHMARK_DEVICE": device, "GPU_BENCHMARK_FLAGS": flags}
    system = System(
        name="gpu",
        what="two ranks on one device",
        start=lambda plan: start_workers(
            plan,
            ["benchmarks.recovery_peers.gpu_worker"],
            preloaded=(*PRELOADED, "recipes_training.preload"),
            variables=variables,
        ),
        missing=lambda: None,
    )
    with run_folder() as folder:
        plan = make_plan(system, folder, num_steps=num_steps, faults=faults)
        plan = dataclasses.replace(plan, num_ranks=NUM_RANKS)
        run = run_job(system, plan, Limits(stall_s=STALL_S))
        log = Path(folder, "log").read_text("utf-8", "replace")
    return RanksRun(end=f"{run.end} {run.words}".strip(), events=run.events, log=log)


def show_fork(device: str, *, num_steps: int = 3) -> list[Row]:
    """Show that the process which forks workers has no context, and the workers have one."""
    run = run_ranks(device, num_steps=num_steps)
    opened = figures.named(run.events, "opened")
    zygotes = {tuple(each.values["zygote"]) for each in opened}
    own = {bool(each.values["own"]) for each in opened}
    return [
        Row(
            part="fork",
            what="the zygote opens no device file, each forked worker trains on the device",
            is_shown=run.is_finished and zygotes == {()} and own == {device != "cpu"},
            seen=f"{run.end}; zygote: {sorted(zygotes)}; workers with a device open: {own}",
        )
    ]


def show_sticky(device: str) -> list[Row]:
    """Show that a rank whose kernel failed is replaced, and the other one is its source."""
    kinds = list(STICKY) if device != "cpu" else list(STICKY)[:1]
    num_steps = FAULT_STEP + 4
    calm = run_ranks(device, num_steps=num_steps)
    rows = []
    for kind in kinds:
        fault = Fault(kind=kind, rank=VICTIM, step=FAULT_STEP)
        run = run_ranks(device, num_steps=num_steps, faults=(fault,))
        problems = judge_sticky(calm.events, run)
        costs = figures.judge_faults(run.events, num_ranks=NUM_RANKS, micro_batch=MICRO_BATCH)
        recovery_s = costs[0].recovery_s if costs else None
        took = "-" if recovery_s is None else f"{recovery_s:.2f} s"
        # What the driver or gloo makes of the error may end the process before.
        how = "its report failed" if "DeviceLostError" in run.log else "it ended before its report"
        rows.append(
            Row(
                part="sticky",
                what=f"{STICKY[kind]}: that rank is replaced at once and repaired from the other",
                is_shown=not problems,
                seen=", ".join(problems) or f"{took}, same bits; {how}",
            )
        )
    return rows


def judge_sticky(calm: Sequence[Event], run: RanksRun) -> list[str]:
    """Return what a run does not show of the rank that failed, or of the other one. Pure."""
    restored = figures.named(run.events, "restored")
    processes = {
        rank: {each.pid for each in restored if each.rank == rank} for rank in range(NUM_RANKS)
    }
    last = {each.rank: each.values for each in restored}
    other = 1 - VICTIM
    claims = {
        f"the run did not finish: {run.end}": run.is_finished,
        "the victim was not replaced": len(processes[VICTIM]) == 2,
        "the other rank was replaced": len(processes[other]) == 1,
        "the victim was not repaired from the other": VICTIM in last
        and (last[VICTIM]["role"], last[VICTIM]["source"]) == ("repaired", other),
        "the other did not keep its state": other in last
        and last[other]["role"] in ("kept", "rolled_forward"),
        "the bits differ": figures.is_equal(calm, run.events) is True,
    }
    return [problem for problem, holds in claims.items() if not holds]


def show_gate(device: str) -> list[Row]:
    """Show that no gate is entered before the host has seen the gradients end."""
    target = torch.device(device)
    idle = take_step(target, is_awaited=False)
    passed = take_step(target)
    broken = take_step(target, is_broken=True)
    is_long = device == "cpu" or idle.had_ended_at_gate is False
    return [
        Row(
            part="gate",
            what="the kernel is longer than the way to a gate that waits for nothing",
            is_shown=is_long,
            seen=f"had ended at the gate: {idle.had_ended_at_gate}",
        ),
        Row(
            part="gate",
            what="the gate is entered after the gradients' last kernel",
            is_shown=passed.had_ended_at_gate is True and passed.phase is Phase.COMPUTING,
            seen=f"had ended at the gate: {passed.had_ended_at_gate}",
        ),
        Row(
            part="gate",
            what="broken meanwhile: the gate is not entered, and the kernel has ended",
            is_shown=broken.had_ended_at_gate is None
            and broken.had_ended_after
            and broken.phase is Phase.REDUCED,
            seen=f"reports {broken.phase.value}, kernel ended: {broken.had_ended_after}",
        ),
    ]


def show_bits(
    device: str, *, flags: Sequence[str] = tuple(FLAGS), num_steps: int = BITS_STEPS
) -> list[Row]:
    """Show which flags it takes for several runs to end with the same bits."""
    rows = []
    for name in flags:
        runs = [run_ranks(device, num_steps=num_steps, flags=name) for _ in range(BITS_RUNS)]
        seen = name_ends([(each.end, figures.digests(each.events)) for each in runs])
        rows.append(
            Row(
                part="bits",
                what=f"{num_steps} steps, {BITS_RUNS} runs, same bits with {FLAGS[name]}",
                # Of the other sets it is asked, not promised.
                is_shown=seen == SAME_BITS if name == "product" else None,
                seen=seen,
            )
        )
    return rows


def name_ends(runs: Sequence[tuple[str, object]]) -> str:
    """Return what runs that should be the same came to, by their ends and digests. Pure."""
    ends = sorted({end for end, _ in runs})
    if ends != ["finished"]:
        return "; ".join(ends)
    return SAME_BITS if len({digest for _, digest in runs}) == 1 else "other bits"


def show_megatron(device: str) -> list[Row]:
    """Show that a worker of Megatron, alone with NCCL, has the losses that it has on a CPU."""
    what = f"{LOSS_STEPS} steps of one worker in fp32, losses of a CPU to {LOSS_TOLERANCE:g}"
    if find_spec("megatron") is None:
        seen = "not shown: no Megatron; run make install-megatron"
        return [Row(part="megatron", what=what, is_shown=None, seen=seen)]
    rows = []
    for recipe in MEGATRON:
        words = (*ALONE, f"trainer.max_steps={LOSS_STEPS}")
        expected = run_recipe("cpu", f"{recipe}_checkpointless", *words)
        run = run_recipe(device, f"{recipe}_checkpointless", *words)
        problem = judge_losses(run.losses, expected.losses)
        seen = f"losses {', '.join(f'{each:.4f}' for each in run.losses)}"
        rows.append(
            Row(
                part="megatron",
                what=f"{recipe}: {what}",
                is_shown=problem is None,
                seen=seen
                if problem is None
                else f"{problem}; {run.last_words}; on a CPU: {expected.last_words}",
            )
        )
    return rows


def show_trainer(device: str) -> list[Row]:
    """Show that recipes lose nothing on a device, and that their attention has one order."""
    precision = ["trainer.precision=bf16"] if device != "cpu" else []
    words = (*precision, f"trainer.max_steps={TRAINER_STEPS}", "resources.shm_gib=1")
    rows = []
    for name, (recipe, num_nodes, overrides) in TRAINERS.items():
        calm, faulty = (
            run_recipe(device, recipe, *words, *overrides, faults, num_nodes=num_nodes)
            for faults in ("resilience.faults=null", TRAINER_FAULTS)
        )
        problem = judge_trainer(calm, faulty)
        rows.append(
            Row(
                part="trainer",
                what=f"{name}: an exception and a SIGKILL, the weights of a run without faults",
                is_shown=problem is None,
                seen=problem or "same weights, no step lost",
            )
        )
    runs = [run_recipe(device, ATTENTION[0], *words, *ATTENTION[1:]) for _ in range(2)]
    seen = name_ends(
        [("finished" if each.digest else each.last_words, each.digest) for each in runs]
    )
    rows.append(
        Row(
            part="trainer",
            what=f"fused attention: {TRAINER_STEPS} steps, 2 runs, same weights",
            is_shown=seen == SAME_BITS,
            seen=seen,
        )
    )
    return rows


def judge_trainer(calm: RecipeRun, faulty: RecipeRun) -> str | None:
    """Return what is wrong with a run that met two faults, beside one that met none. Pure."""
    for name, run in (("without faults", calm), ("with faults", faulty)):
        if run.status != 0 or len(run.losses) != TRAINER_STEPS or not run.digest:
            return f"{name}: status {run.status}, {len(run.losses)} steps; {run.last_words}"
    if calm.num_faults or not faulty.num_faults:
        return f"{calm.num_faults} and {faulty.num_faults} faults were detected"
    if (calm.losses, calm.digest) != (faulty.losses, faulty.digest):
        return "other losses or weights"
    return None


def judge_losses(losses: Sequence[float], expected: Sequence[float]) -> str | None:
    """Return what is wrong with the losses of a run, beside those of a CPU. Pure."""
    if (len(losses), len(expected)) != (LOSS_STEPS, LOSS_STEPS):
        return f"{len(losses)} steps, and {len(expected)} on a CPU"
    for step, (loss, other) in enumerate(zip(losses, expected, strict=True)):
        # So that no loss that is no number passes.
        if not abs(loss - other) <= LOSS_TOLERANCE * other:
            return f"loss {loss:.6f} at step {step}, and {other:.6f} on a CPU"
    return None


PARTS: dict[str, tuple[str, Callable[[str], list[Row]]]] = {
    "fork": ("the zygote has no context, a forked worker opens one", show_fork),
    "sticky": ("a rank whose kernel failed is replaced, the other is the source", show_sticky),
    "gate": ("the gate is entered after the host saw the gradients end", show_gate),
    "bits": (f"{BITS_STEPS} steps, {BITS_RUNS} runs, same bits", show_bits),
    "trainer": ("recipes lose nothing, attention has one order", show_trainer),
    "megatron": (f"{LOSS_STEPS} steps of Megatron have the losses of a CPU", show_megatron),
}


def render(row: Row) -> str:
    """Render one line of the table."""
    shown = {True: "yes", False: "NO", None: "not asked"}[row.is_shown]
    if row.seen.startswith("not shown"):
        return f"| {row.part} | {row.what} | {row.seen} | |"
    return f"| {row.part} | {row.what} | {shown} | {row.seen} |"


def describe_device(device: str) -> str:
    """Return the name of what the parts run on, with the versions that matter."""
    if device == "cpu":
        return f"a CPU, which shows the programs and nothing of a GPU; torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a part does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", type=machine.names_of(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    is_there = options.device == "cpu" or torch.cuda.is_available()
    print(" | ".join(f"{key} {value}" for key, value in machine.describe_machine().items()))
    print(describe_device(options.device) if is_there else NO_GPU)
    print("| part | what has to hold | shown | seen |\n|---|---|---|---|", flush=True)
    has_failed = False
    for name in options.parts:
        what, show = PARTS[name]
        missing = Row(part=name, what=what, is_shown=None, seen=f"not shown: {NO_GPU}")
        for row in show(options.device) if is_there else [missing]:
            print(render(row), flush=True)
            has_failed |= row.is_shown is False
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
