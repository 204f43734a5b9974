"""The model that a run has trained, in Hugging Face's layout.

Workers gather one parameter after the other; rank 0 writes a file whenever one
is full, so it holds one file's tensors and nobody holds the model. The folder
appears by rename when everything in it is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, LlamaConfig

from launcher.job.workload import Model
from training.errors import CheckpointError
from training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from training.plan import plan_files, plan_model_config

FILE_BYTES_MAX = 4 << 30

_STARTED = "started"
_PUBLISHED = "published"


def write_model(
    path: Path,
    *,
    sizes: Mapping[str, int],
    gather: Callable[[str], Tensor],
    config: Any,
    group: WorkerGroup,
    file_bytes_max: int = FILE_BYTES_MAX,
    beside: Sequence[Path] = (),
) -> None:
    """Write the folder `path`; all workers take part and return when it is there.

    `sizes` has the tensors' bytes by name, in the order of the files, alike on all workers.
    `gather` is called on all of them for one name after the other; what it returns counts on rank
    0 alone. `config` is the model's, of transformers, with its architecture. Files `beside` are
    copied.
    """
    files = plan_files(sizes, file_bytes_max)
    if group.rank != 0:
        _help_write(gather, files, group)
        return
    with _unfinished_folder(path) as unfinished:
        with _lead(_STARTED, group, path):
            unfinished.mkdir(parents=True)
        for names, file_name in zip(files, _file_names(len(files)), strict=True):
            with _lead(file_name, group, path):
                _write_file(unfinished / file_name, names, gather)
        with _lead(_PUBLISHED, group, path):
            for each in beside:
                shutil.copyfile(each, unfinished / each.name)
            _write_rest(config, unfinished, files, sizes)
            _publish(unfinished, path)


def make_config(model: Model) -> Any:
    """Return a model's configuration, of transformers."""
    is_llama = model.architecture == "llama"
    config = (LlamaConfig if is_llama else GptOssConfig)(**plan_model_config(model))
    config.architectures = ["LlamaForCausalLM" if is_llama else "GptOssForCausalLM"]
    return config


def _write_file(path: Path, names: list[str], gather: Callable[[str], Tensor]) -> None:
    """Write one file, and keep nothing of it: the next one would come on top."""
    tensors = {name: gather(name).cpu().contiguous() for name in names}
    save_file(tensors, path, metadata={"format": "pt"})


def _help_write(
    gather: Callable[[str], Tensor], files: list[list[str]], group: WorkerGroup
) -> None:
    """Give rank 0 the parts of one file after the other.

    Between files a worker waits by the store: there it hears that rank 0 failed,
    in a collective it would wait for it in vain.
    """
    group.follow(f"checkpoint/{_STARTED}", CHECKPOINT_TIMEOUT)
    for names, file_name in zip(files, _file_names(len(files)), strict=True):
        for name in names:
            gather(name)
        group.follow(f"checkpoint/{file_name}", CHECKPOINT_TIMEOUT)
    group.follow(f"checkpoint/{_PUBLISHED}", CHECKPOINT_TIMEOUT)


@contextmanager
def _lead(topic: str, group: WorkerGroup, path: Path) -> Iterator[None]:
    """Do a part of the writing that the other workers wait for."""
    with group.lead(f"checkpoint/{topic}"):
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from error


@contextmanager
def _unfinished_folder(path: Path) -> Iterator[Path]:
    """Name a folder beside `path`; nothing of it is there before and after the block."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _file_names(num_files: int) -> list[str]:
    if num_files == 1:
        return ["model.safetensors"]
    return [
        f"model-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)
    ]


def _write_rest(
    config: Any, folder: Path, files: list[list[str]], sizes: Mapping[str, int]
) -> None:
    """Write what stands beside the tensors: the index and the model's configuration."""
    file_names = _file_names(len(files))
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {
                name: file_name
                for names, file_name in zip(files, file_names, strict=True)
                for name in names
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(f"{text}\n")
    config.save_pretrained(folder)


def _publish(unfinished: Path, path: Path) -> None:
    """Give the folder its name, in place of an older one."""
    # safetensors makes files that nobody else may read; config.json follows the umask.
    mode = (unfinished / "config.json").stat().st_mode
    for file in unfinished.iterdir():
        file.chmod(mode)
        _sync(file)
    _sync(unfinished)
    older = path.with_name(f"{path.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if path.exists():
        path.rename(older)
    unfinished.rename(path)
    _sync(path.parent)
    shutil.rmtree(older, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
