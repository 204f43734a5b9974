"""A folder of weights in Hugging Face's layout: whether it fits a job's model, and parts of it.

A worker reads only the part of a tensor that it holds, straight from the safetensors files, so no
worker has a copy of the whole model. Quantised weights are refused:
`python -m recipes_training.convert` expands them beforehand.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.job.parameters import shapes
from launcher.job.workload import Model
from recipes_training.errors import WeightsError
from recipes_training.plan import plan_model_config
from recipes_training.weights.export import make_config
from recipes_training.weights.tensors import Part
from resilience.plain_files import open_plain, read_plain
from resilience.validation import first_problem, list_some

PACKED = "mxfp4"
"""The way of packing weights that recipes_training.convert expands."""
_CONFIG_NAME = "config.json"
_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
# What may differ between the run that made the weights and the one that takes them. All other keys
# of transformers' config are compared, also those of a later version.
_FREE_KEYS = frozenset(
    {
        "initializer_range",
        "max_position_embeddings",
        "router_aux_loss_coef",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        # What says who made the weights, and what else a forward returns.
        *("_name_or_path", "architectures", "dtype", "transformers_version", "problem_type"),
        *("id2label", "label2id", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "return_dict", "use_cache"),
    }
)
_TWINS = {"model.embed_tokens.weight": "lm_head.weight"}
"""Tensors that are one in a model with tied embeddings; some folders hold both."""
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that older versions of transformers wrote, and that follow from the config."""
_FLOATS, _BYTES = ("F32", "BF16", "F16"), ("U8",)
"""Types of plain weights and of packed ones, by their names in safetensors."""
_PACKED_NAME = re.compile(r"_(blocks|scales)$")
_REASON_MAX = 300
_MAPPED_MAX = 32 << 20
"""Bytes of a file that are read before it is opened anew."""


class _Index(BaseModel):
    weight_map: dict[str, str]


class _Config(BaseModel):
    """What transformers tells nobody by name when it is otherwise."""

    quantization_config: dict[str, Any] | None = None


class WeightsFolder:
    """The tensors of a folder by name; raises WeightsError for what it has not, or cannot read."""

    def __init__(self, folder: Path, *, key: str = "model.weights", is_tied: bool = False) -> None:
        """`key` is by what a person has named the folder; `is_tied` as its model's embeddings."""
        self._twins = _TWINS if is_tied else {}
        self._title = f"{key} {folder}"
        self._files = _read_index(folder, self._title)
        self._opened: tuple[Path, Any] | None = None
        self._num_mapped = 0

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check_asked(self, names: Collection[str]) -> None:
        """Refuse tensors that no model of these names asks for, and those of another type."""
        known = {*names, *self._twins.values()}
        others = [each for each in self._files if each not in known and not _DERIVED.search(each)]
        if others:
            raise WeightsError(
                f"{self._title} has {list_some(others)}, which the model does not have"
            )
        for path in sorted({*self._files.values()}):
            try:
                opened = self._open(path)
                found = opened.keys()
                dtypes = {each: opened.get_slice(each).get_dtype() for each in found}
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"cannot read {path}: {error}") from error
            if others := [each for each in dtypes if self._files.get(each) != path]:
                text = f"{path} has {list_some(others)}, and {_INDEX_NAME} does not say so"
                raise WeightsError(text)
            for name, dtype in dtypes.items():
                if dtype not in (allowed := _BYTES if _PACKED_NAME.search(name) else _FLOATS):
                    raise WeightsError(
                        f"{path} has {name} as {dtype}; allowed: {list_some(allowed)}"
                    )

    def read(self, name: str, shape: Sequence[int], part: Part = (slice(None),)) -> Tensor:
        """Return a part of a tensor, which has to have the shape."""
        path = self._files.get(name)
        if path is None:
            raise WeightsError(f"{self._title} has no parameter {name!r}")
        try:
            found = self._open(path).get_slice(name)
            own = tuple(found.get_shape())
            values: Tensor | None = found[part] if own == tuple(shape) else None
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {name!r} in {path}: {error}") from error
        if values is None:
            raise WeightsError(f"{name!r} in {path} has the shape {own}, the model {tuple(shape)}")
        self._num_mapped += values.nbytes
        twin = self._twins.get(name)
        if twin in self._files and not torch.equal(values, self.read(twin, shape, part)):
            raise WeightsError(
                f"{self._title} has other values in {twin!r} than in {name!r}, and the model has "
                "one tensor for both; set model.tie_embeddings to false"
            )
        return values

    def _open(self, path: Path) -> Any:
        """Return the file, which stays open until another one is read or much of it was.

        What has been read of an open file counts as this process's memory.
        """
        if self._opened is None or self._opened[0] != path or self._num_mapped > _MAPPED_MAX:
            self._opened = None
            self._opened, self._num_mapped = (path, _open_file(path)), 0
        return self._opened[1]


def check_weights(folder: Path, model: Model) -> None:
    """Refuse weights of a model that computes something else than the job's."""
    config = read_config(folder)
    if (packing := find_packing(config)) is not None:
        raise WeightsError(
            f"model.weights {folder} is quantised ({packing}), and training needs plain weights; "
            + _tell_remedy(folder, packing)
        )
    if config.model_type != model.architecture:
        raise WeightsError(
            f"model.weights {folder} is of architecture {config.model_type!r}, "
            f"model.architecture is {model.architecture!r}"
        )
    expected = {**make_config(model).to_dict(), "auto_map": None}
    settable = plan_model_config(model)
    for key in sorted(expected.keys() - _FREE_KEYS, key=lambda each: (each not in settable, each)):
        if (found := getattr(config, key, None)) != expected[key]:
            advice = "set the job's model to that of the weights"
            if key not in settable:
                advice = "no setting of a job changes that, so these weights cannot be trained"
            raise WeightsError(
                f"model.weights {folder} has {key} {found!r}, the job {expected[key]!r}; {advice}"
            )
    open_weights(folder, model)


def open_weights(folder: Path, model: Model) -> WeightsFolder:
    """Return the tensors of a folder that has none but those of the model."""
    weights = WeightsFolder(folder, is_tied=model.tie_embeddings)
    weights.check_asked(shapes(model))
    return weights


def read_config(folder: Path, *, key: str = "model.weights") -> Any:
    """Return the model's configuration, of transformers."""
    from transformers import AutoConfig

    path = folder / _CONFIG_NAME
    try:
        _Config.model_validate_json(read_plain(path))
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what transformers raises for a value depends on the value
        reason = textwrap.shorten(_tell_reason(error, path), _REASON_MAX)
        raise WeightsError(f"{key} {folder} has no usable config: {reason}") from error


def find_packing(config: Any) -> str | None:
    """Return the name of the way in which a model's weights are quantised, None for plain ones."""
    found = getattr(config, "quantization_config", None)
    return found and str(dict(found).get("quant_method"))


def _tell_remedy(folder: Path, packing: str) -> str:
    if packing != PACKED:
        return f"recipes_training.convert expands {PACKED} alone"
    plain = f"{folder}-plain"
    words = shlex.join(["python", "-m", "recipes_training.convert", str(folder), plain])
    return f"expand them with `{words}` and set model.weights to {plain}"


def _read_index(folder: Path, title: str) -> dict[str, Path]:
    """Return the file of each parameter."""
    index, single = folder / _INDEX_NAME, folder / _SINGLE_NAME
    try:
        if index.exists():
            names = _Index.model_validate_json(read_plain(index)).weight_map
            if single.exists() and _SINGLE_NAME not in names.values():
                raise WeightsError(f"{title} has {_INDEX_NAME} and {_SINGLE_NAME}; remove one")
            return {name: folder / file for name, file in names.items()}
        with _open_file(single) as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise WeightsError(f"{title} has no usable {single.name}: {error}") from error
    except (OSError, ValidationError) as error:
        raise WeightsError(f"{title} has no safetensors: {_tell_reason(error, index)}") from error


def _open_file(path: Path) -> Any:
    """Open the tensors of a plain file: opening a pipe would wait for ever."""
    os.close(open_plain(path, os.O_RDONLY))
    return safe_open(path, framework="pt")


def _tell_reason(error: Exception, path: Path) -> str:
    if isinstance(error, ValidationError):
        return f"{path.name}: {first_problem(error, whole='the whole file')}"
    return str(error)
