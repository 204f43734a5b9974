"""How much memory conversion takes, and a rank that loads its shard.

    python -m benchmarks.convert [-n 3] [--folder FOLDER]

The model is GPT-OSS's with random weights, 1 GiB in bf16 and so much less as MXFP4. Each figure is
of a fresh process: VmHWM beyond what it held before, which for a conversion is after its imports.
A rank of Megatron has filled its shard once before, so that all of it is in memory. The bar is the
largest tensor and one file of 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import spread
from benchmarks.machine import describe_machine

MIB = 1 << 20
MODEL = {
    "num_hidden_layers": 10, "hidden_size": 1024, "intermediate_size": 1024,
    "num_local_experts": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 32768, "num_experts_per_tok": 4, "max_position_embeddings": 4096,
    "sliding_window": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
KEYS = {
    "num_layers": 10, "hidden_size": 1024, "ffn_hidden_size": 1024, "num_experts": 16,
    "num_heads": 16, "num_kv_heads": 8, "head_dim": 64, "vocab_size": 32768,
    "num_experts_per_token": 4, "context_length": 4096, "sliding_window": 128, "norm_eps": 1e-5,
    "tie_embeddings": "false", "rope_theta": 10000.0, "rope_scaling": "null",
}  # fmt: skip
LAYOUTS = {
    "expert_parallel 2": ["trainer.expert_parallel=2"],
    "tensor_parallel 2": ["trainer.tensor_parallel=2", "trainer.sequence_parallel=true"],
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=3, help="runs of each row")
    parser.add_argument("--folder", help="where to write up to 2 GiB (default: a temporary one)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _be_child(*given.child)
        return
    print(" | ".join(f"{key} {value}" for key, value in describe_machine().items()), flush=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        largest = int(_run_child("write", folder / "packed")[-1]) / MIB
        print(f"largest tensor {largest:.0f} MiB; the bar is {largest + 256:.0f} MiB")
        print("| what | n | MiB beyond its own, median (smallest-largest) |\n|---|---|---|")
        own = []
        for number in range(given.n):
            plain = folder / f"plain-{number}"
            own.append(float(_run_child("expand", folder / "packed", plain)[-1]))
            if number:
                subprocess.run(["rm", "-r", plain], check=True)
        _print_row("MXFP4 to bf16", own)
        for title, keys in LAYOUTS.items():
            _print_row(f"a rank, {title}", list(_load(folder, keys, given.n)))


def _print_row(title: str, own: list[float]) -> None:
    print(f"| {title} | {len(own)} | {spread(own)} |", flush=True)


def _run_child(*arguments: object, **variables: str) -> list[str]:
    """Return the lines that a fresh process has printed."""
    return _collect(_start_child(*arguments, **variables))


def _start_child(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.convert", "--child", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _collect(child: subprocess.Popen[str]) -> list[str]:
    output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"{child.args} has ended with status {child.returncode}")
    return output.splitlines()


def _load(folder: Path, keys: list[str], num_runs: int) -> Iterator[float]:
    """Yield the larger of both ranks' figures."""
    for number in range(num_runs):
        run_dir = folder / f"run-{number}-{len(keys)}-{keys[0].partition('=')[0]}"
        render = [
            *("recipe=gpt_oss/gpt_oss_tiny_megatron_checkpointless", "action=render"),
            *("resilience.checkpointless=null", "resilience.faults=null", "trainer.num_replicas=1"),
            *(
                "resilience.tiered=null",
                "trainer.num_nodes=1",
                "trainer.num_devices=2",
                "trainer.precision=bf16",
            ),
            *("trainer.expert_parallel=1", f"model.weights={folder / 'plain-0'}"),
            *(f"model.{key}={value}" for key, value in KEYS.items()),
            *(*keys, f"run.dir={run_dir}"),
        ]
        subprocess.run([sys.executable, "-m", "launcher", *render], check=True, capture_output=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        ranks = [
            _start_child("load", run_dir, **places, MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank)
            for rank in "01"
        ]
        yield max(float(_collect(each)[-1]) for each in ranks)


def _be_child(what: str, *paths: str) -> None:
    {"write": _write, "expand": _expand, "load": _load_rank}[what](*map(Path, paths))


def _write(folder: Path) -> None:
    """Write a packed model layer by layer; print the size of its largest tensor in bf16."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GptOssConfig

    folder.mkdir()
    config = GptOssConfig(**MODEL, architectures=["GptOssForCausalLM"])
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    del config.quantization_config
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    files: dict[str, str] = {}
    for number, (name, each) in enumerate(parameters.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = each.shape
            scales = (experts, outputs, inputs // 32)
            tensors = {
                f"{name}_blocks": torch.randint(256, (*scales, 16), dtype=torch.uint8),
                f"{name}_scales": torch.randint(110, 120, scales, dtype=torch.uint8),
            }
        else:
            tensors = {name: torch.randn(each.shape, dtype=torch.bfloat16) * 0.02}
        file = f"model-{number}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    print(2 * max(each.numel() for each in parameters.values()))


def _expand(source: Path, target: Path) -> None:
    from recipes_training.convert import expanding
    from recipes_training.convert.__main__ import main as convert

    assert expanding
    before = _reset_peak()
    if convert([str(source), str(target)]):
        raise SystemExit(1)
    print(_read_status("VmHWM") - before)


def _load_rank(run_dir: Path) -> None:
    """Fill this rank's shard twice; print what the second time takes."""
    from recipes_training.__main__ import main as train
    from recipes_training.megatron.cpu import stand_in

    stand_in()
    from recipes_training.megatron.trainer import MegatronTrainer

    class Measured(MegatronTrainer):
        def fill(self) -> None:
            super().fill()
            before = _reset_peak()
            super().fill()
            print(_read_status("VmHWM") - before, flush=True)
            os._exit(0)

    train([f"--job={run_dir}/job.json", f"--run-dir={run_dir}", "--node-name=n"], Measured)
    raise SystemExit(1)


def _reset_peak() -> float:
    """Let VmHWM begin anew; returns what is in memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return _read_status("VmRSS")


def _read_status(key: str) -> float:
    """Return a line of this process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) / 1024 for each in lines if each.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
