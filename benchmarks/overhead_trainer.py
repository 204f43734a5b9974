"""A Trainer's steps, the plain one's and this package's in turn: what recovery costs.

    python -m benchmarks.overhead_trainer [--framework huggingface|lightning] [--pairs 1000]

Two workers train the tiny model with a framework's Trainer under torchrun, two with that of
`resilience.frameworks` under the agent. Before each step all ranks ask for their turn, and one of
the programs has it until its ranks ask again, pair by pair in changing order.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import overhead_figures as figures

NUM_RANKS = 2
WARM_UP = 20
ASK_LIMIT_S = 120.0
NAMES = ("plain", "ours")
COMMANDS = {
    "plain": ("torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"),
    "ours": ("resilience.agent", f"--nproc-per-node={NUM_RANKS}"),
}


class Turns:
    """The side that gives turns to ranks of both programs, each over a connection of its own."""

    def __init__(self, listener: socket.socket) -> None:
        self._ranks: dict[str, list[socket.socket]] = {name: [] for name in NAMES}
        for _ in range(NUM_RANKS * len(NAMES)):
            rank, _address = listener.accept()
            rank.settimeout(ASK_LIMIT_S)
            self._ranks[NAMES[rank.recv(1)[0]]].append(rank)
        for name in NAMES:
            self._wait(name)

    def _wait(self, name: str) -> None:
        for rank in self._ranks[name]:
            if not rank.recv(1):
                raise RuntimeError(f"a rank of {name} has ended")

    def give(self, name: str) -> float:
        """Let a program take a step; return its seconds."""
        began_s = time.monotonic()
        for rank in self._ranks[name]:
            rank.sendall(b".")
        self._wait(name)
        return time.monotonic() - began_s

    def end(self) -> None:
        """Let both programs go on to their ends."""
        for rank in (rank for ranks in self._ranks.values() for rank in ranks):
            rank.close()


class Asking:
    """A callback's part: asks for the turn of a step."""

    def __init__(self, name: str, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(bytes([NAMES.index(name)]))

    def ask(self) -> None:
        """Return once it is this program's turn."""
        self._socket.sendall(b".")
        self._socket.recv(1)


def train_huggingface(name: str, asking: Asking, num_steps: int) -> None:
    """Be one rank of a program with transformers.Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from benchmarks.recovery_peers import job
    from resilience.frameworks import huggingface

    class Asks(TrainerCallback):
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            asking.ask()

    model, _ = job.build_model(num_hidden_layers=12)
    rows = [{"input_ids": each, "labels": each} for each in map(job.draw_sample, range(4096))]
    options = {"logging_steps": 50, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    options["ddp_find_unused_parameters"] = False
    kind: Any = huggingface.Trainer if name == "ours" else Trainer
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=num_steps, per_device_train_batch_size=2, **options
        )
        kind(model=model, args=arguments, train_dataset=rows, callbacks=[Asks()]).train()


def train_lightning(name: str, asking: Asking, num_steps: int) -> None:
    """Be one rank of a program with Lightning's Trainer."""
    import lightning
    import torch

    from benchmarks.recovery_peers import job
    from resilience.frameworks.lightning import RecoveringDDPStrategy

    class Asks(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *given: Any, **named: Any) -> None:
            asking.ask()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.core, _ = job.build_model(num_hidden_layers=12)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = job.compute_loss(self.core, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "logger"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=RecoveringDDPStrategy() if name == "ours" else "ddp",
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[Asks()],
        **quiet,
    )
    data: Any = list(map(job.draw_sample, range(4096)))
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))


TRAIN = {"huggingface": train_huggingface, "lightning": train_lightning}


def measure(framework: str, pairs: int) -> dict[str, list[float]]:
    """Start both programs and give them turns; return the seconds of their steps."""
    order, found = random.Random(0), {name: list[float]() for name in NAMES}
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        listener.settimeout(ASK_LIMIT_S)
        own = ["benchmarks.overhead_trainer", f"--framework={framework}", f"--pairs={pairs}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        programs = []
        for name, (module, *options) in COMMANDS.items():
            command = [sys.executable, "-m", module, *options]
            command += [f"--run-dir={folder}/run", "--", "python"] if name == "ours" else []
            place = [name, str(listener.getsockname()[1])]
            command += ["-m", *own, "--rank-of", *place]
            programs.append(subprocess.Popen(command, env=environment))
        try:
            turns = Turns(listener)
            for _ in range(WARM_UP + pairs):
                for name in order.sample(NAMES, len(NAMES)):
                    found[name].append(turns.give(name))
            turns.end()
            if any(each.wait(ASK_LIMIT_S) for each in programs):
                raise RuntimeError("a program has failed")
        finally:
            for each in programs:
                each.terminate()
                each.wait()
    return {name: each[WARM_UP:] for name, each in found.items()}


def main() -> None:
    """Print what both programs' steps took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=sorted(TRAIN), default="huggingface")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--rank-of", nargs=2, help="name and port: be a rank of this program")
    options = parser.parse_args()
    if options.rank_of:
        name, port = options.rank_of
        num_steps = WARM_UP + options.pairs + 1
        TRAIN[options.framework](name, Asking(name, int(port)), num_steps)
        return
    plain, ours = measure(options.framework, options.pairs).values()
    medians = " and ".join(f"{1e3 * statistics.median(each):.2f} ms" for each in (ours, plain))
    print(f"ours / plain step {figures.judge_pairs(ours, plain)}, medians {medians}")


if __name__ == "__main__":
    main()
