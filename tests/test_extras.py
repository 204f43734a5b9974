"""Each extra of the package brings what it is for, in a fresh environment."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.recipes_training.workers import ROOT

AWS = "amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem"
IMPORTS = {
    "train": "torch, transformers, safetensors.torch, plotly.graph_objects, xxhash",
    "validate": "kubernetes_validate",
    "megatron": "megatron.core.parallel_state, einops",
    "aws": f"s3torchconnector, boto3, {AWS}",
    "examples": "accelerate, lightning",
    "ray": "ray",
    "s3": "s3torchconnector, boto3",
    "encryption": "cryptography.hazmat.primitives.ciphers.aead, boto3",
    "tls": "cryptography.x509, resilience.runtime.tls",
    "health": "pynvml, prometheus_client, kubernetes.client",
    "huggingface": "transformers, accelerate",
    "lightning": "lightning.pytorch",
}
RESOLVED_ALONE = {"dev", "nemo"}
"""These tests run on dev; nemo takes gigabytes."""


def test_each_extra_is_tried() -> None:
    _, _, text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")
    known = re.findall(r"^(\w+) = \[", text.partition("\n[")[0], re.MULTILINE)
    assert set(known) == set(IMPORTS) | RESOLVED_ALONE


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the packages of an environment that has torch and nothing else."""
    folder = tmp_path_factory.mktemp("torch")
    venv.create(folder, with_pip=True)
    [version] = re.findall(
        r"^TORCH_VERSION \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    run(ROOT / "scripts/install-torch.sh", folder / "bin/python", version)
    return packages_of(folder)


def packages_of(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))


def run(*words: str | Path, folder: Path = ROOT) -> str:
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", IMPORTS)
def test_an_extra_is_imported(tmp_path: Path, torch_folder: Path, extra: str) -> None:
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True)
    # As where torch is there before; all else comes with the extra.
    (packages_of(fresh) / "torch.pth").write_text(f"{torch_folder}\n")

    run(fresh / "bin/pip", "install", f"{ROOT}[{extra}]")
    run(fresh / "bin/python", "-W", "ignore", "-c", f"import {IMPORTS[extra]}", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_extra_for_nemo_resolves(tmp_path: Path) -> None:
    """pip finds versions of all; it installs nothing."""
    venv.create(tmp_path / "fresh", with_pip=True)
    held = ("--dry-run", "--constraint", "constraints/nemo.txt")

    assert "Would install" in run(tmp_path / "fresh/bin/pip", "install", *held, f"{ROOT}[nemo]")
