"""The model that a run has trained, in Hugging Face's layout.

Workers gather one parameter after the other; rank 0 writes a file whenever one
is full, so it holds one file's tensors and nobody holds the model. The folder
appears by rename when everything in it is on the disk. Until then it is in a
draft beside it, which no other process has; what a killed one has left there
is known by a mark.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, LlamaConfig

from launcher.job.workload import Model
from recipes_training.errors import CheckpointError
from recipes_training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from recipes_training.plan import plan_files, plan_model_config

FILE_BYTES_MAX = 4 << 30

_STARTED = "started"
_PUBLISHED = "published"
_DRAFT = "{name}.unfinished-"
# In a draft:
_MARK = ".training-draft"
_NEW = "new"
_OLDER = "older"


def write_model(
    path: Path,
    *,
    sizes: Mapping[str, int],
    gather: Callable[[str], Tensor],
    config: Any,
    group: WorkerGroup,
    file_bytes_max: int = FILE_BYTES_MAX,
    beside: Sequence[Path] = (),
    is_replacing: bool = True,
) -> None:
    """Write the folder `path`; all workers take part and return when it is there.

    `sizes` has the tensors' bytes by name, in the order of the files, alike on all workers.
    `gather` is called on all of them for one name after the other; what it returns counts on rank
    0 alone. `config` is the model's, of transformers, with its architecture. Files `beside` are
    copied. An older folder of that name is replaced, or is an error.
    """
    files = plan_files(sizes, file_bytes_max)
    if group.rank != 0:
        _help_write(gather, files, group)
        return
    with _lead(_STARTED, group, path):
        draft = _open_draft(path)
    new = draft / _NEW
    try:
        for names, file_name in zip(files, _file_names(len(files)), strict=True):
            with _lead(file_name, group, path):
                _write_file(new / file_name, names, gather)
        with _lead(_PUBLISHED, group, path):
            for each in beside:
                shutil.copyfile(each, new / each.name)
            _write_rest(config, new, files, sizes)
            _publish(draft, path, is_replacing=is_replacing)
    finally:
        _discard(draft, path)


def clear_drafts(path: Path) -> None:
    """Remove what killed processes have left of this folder; who writes it at this moment fails."""
    prefix = _DRAFT.format(name=glob.escape(path.name))
    for draft in path.parent.glob(f"{prefix}*"):
        if (draft / _MARK).exists():
            _discard(draft, path)


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


def _open_draft(path: Path) -> Path:
    """Return a marked folder beside `path` that nobody else has, with a new one in it."""
    clear_drafts(path)
    draft = Path(tempfile.mkdtemp(prefix=_DRAFT.format(name=path.name), dir=path.parent))
    (draft / _MARK).touch()
    (draft / _NEW).mkdir()
    return draft


def _discard(draft: Path, path: Path) -> None:
    """Remove a draft; an older folder in it gets its name back where no newer one has it."""
    if (older := draft / _OLDER).exists() and not path.exists():
        older.rename(path)
    shutil.rmtree(draft, ignore_errors=True)


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


def _publish(draft: Path, path: Path, *, is_replacing: bool) -> None:
    """Give the new folder its name, in place of an older one."""
    new = draft / _NEW
    # safetensors makes files that nobody else may read; config.json follows the umask.
    mode = (new / "config.json").stat().st_mode
    for file in new.iterdir():
        file.chmod(mode)
        _sync(file)
    _sync(new)
    if is_replacing and path.exists():
        path.rename(draft / _OLDER)
    try:
        new.rename(path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise CheckpointError(
            f"{path} has come to be there meanwhile, and is left alone"
        ) from error
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
