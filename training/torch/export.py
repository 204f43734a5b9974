"""The model that a run has trained, in Hugging Face's layout.

Workers gather one parameter after the other; rank 0 writes a file whenever one
is full, so it holds one file's tensors and nobody holds the model. The folder
appears by rename when everything in it is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.errors import CheckpointError
from training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from training.plan import plan_files

FILE_BYTES_MAX = 4 << 30

_STARTED = "started"
_PUBLISHED = "published"


def write_model(
    core: Any, path: Path, *, group: WorkerGroup, file_bytes_max: int = FILE_BYTES_MAX
) -> None:
    """Write the folder `path`; all workers take part and return when it is there."""
    parameters: dict[str, Tensor] = dict(core.named_parameters())
    sizes = {name: each.numel() * each.element_size() for name, each in parameters.items()}
    files = plan_files(sizes, file_bytes_max)
    if group.rank != 0:
        _help_write(parameters, files, group)
        return
    with _unfinished_folder(path) as unfinished:
        with _lead(_STARTED, group, path):
            unfinished.mkdir(parents=True)
        for names, file_name in zip(files, _file_names(len(files)), strict=True):
            with _lead(file_name, group, path):
                tensors = {name: _gather(parameters[name]).cpu().contiguous() for name in names}
                save_file(tensors, unfinished / file_name, metadata={"format": "pt"})
        with _lead(_PUBLISHED, group, path):
            _write_rest(core, unfinished, files, sizes)
            _publish(unfinished, path)


def _help_write(parameters: dict[str, Tensor], files: list[list[str]], group: WorkerGroup) -> None:
    """Give rank 0 the shards of one file after the other.

    Between files a worker waits by the store: there it hears that rank 0 failed,
    in a collective it would wait for it in vain.
    """
    group.follow(f"checkpoint/{_STARTED}", CHECKPOINT_TIMEOUT)
    for names, file_name in zip(files, _file_names(len(files)), strict=True):
        for name in names:
            _gather(parameters[name])
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


def _gather(parameter: Tensor) -> Tensor:
    """Return the whole parameter; a collective of the workers that share it."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            return parameter.full_tensor()
        return parameter.detach()


def _file_names(num_files: int) -> list[str]:
    if num_files == 1:
        return ["model.safetensors"]
    return [
        f"model-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)
    ]


def _write_rest(core: Any, folder: Path, files: list[list[str]], sizes: dict[str, int]) -> None:
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
    core.config.architectures = [_class_name(core)]
    core.config.save_pretrained(folder)


def _class_name(core: Any) -> str:
    """Return the model's own class name; sharding puts one of its own before it."""
    return next(each.__name__ for each in type(core).__mro__ if "transformers" in each.__module__)


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
