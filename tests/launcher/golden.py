"""The rendered texts of every shipped recipe: which are kept whole, and the digests of the others.

python -m tests.launcher.golden            write them again, and print how the others have changed
python -m tests.launcher.golden REVISION   print how all texts differ from those of a revision
"""

from __future__ import annotations

import difflib
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.launcher.shipped import CLUSTERS, RECIPES, rendered, shipped_job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/golden"
DIGESTS = FOLDER / "digests.txt"
# What differs most: its recipe, and the clusters that show it. test_manifest_trainjob.py holds the
# pods of a TrainJob against a plain Job's.
WHOLE = {
    "llama/llama3_70b_pretrain_checkpointless": tuple({*CLUSTERS} - {"trainjob"}),
    "llama/llama3_tiny_elastic": ("job", "slurm"),
    "llama/llama3_tiny_megatron_checkpointless": ("slurm", "local"),
    "llama/llama3_tiny_pretrain": ("job", "slurm", "local"),
    "llama/llama3_tiny_tiered": ("job", "slurm", "local"),
}
ALIKE = frozenset(each for each in RECIPES if each.startswith("script/")) - {"script/torch_ddp"}
"""Recipes of scripts that render as another one does: a digest for each kind of cluster."""
JOB_CLUSTER = "job"
"""The kind of cluster whose job.json is kept, of every recipe."""
WRITE = """
import pathlib, sys
from tests.launcher.golden import CLUSTERS, RECIPES, texts_of
for recipe in RECIPES:
    for cluster in CLUSTERS:
        for name, text in texts_of(recipe, cluster).items():
            path = pathlib.Path(sys.argv[1], name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
"""


def texts_of(recipe: str, cluster: str) -> dict[str, str]:
    """Return the rendered texts of a recipe for a kind of cluster, by RECIPE/CLUSTER/FILE."""
    texts = rendered(shipped_job(recipe, cluster))
    if recipe in ALIKE:
        texts = {"all": "".join(f"{name}:\n{text}" for name, text in texts.items())}
    return {f"{recipe}/{cluster}/{name}": text for name, text in texts.items()}


def is_whole(name: str) -> bool:
    """Return whether a text is kept whole; of a recipe's nodes the first two are."""
    recipe, cluster, file = name.rsplit("/", 2)
    if file == "job.json":
        return cluster == JOB_CLUSTER
    node = re.fullmatch(r"node-(\d+)\.sh", file)
    return cluster in WHOLE.get(recipe, ()) and (node is None or int(node[1]) < 2)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_digests() -> dict[str, str]:
    """Return the reviewed digests of the texts that are not kept."""
    return parse_digests(DIGESTS.read_text())


def parse_digests(text: str) -> dict[str, str]:
    return {name: value for value, name in (line.split() for line in text.splitlines())}


def read_whole() -> dict[str, str]:
    """Return the reviewed texts."""
    files = (path for path in FOLDER.rglob("*") if path.is_file() and path != DIGESTS)
    return {path.relative_to(FOLDER).as_posix(): path.read_text() for path in files}


def write(texts: Mapping[str, str]) -> None:
    """Put these texts in place of the reviewed ones."""
    for path in sorted(FOLDER.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    digests = []
    for name, text in sorted(texts.items()):
        if is_whole(name):
            path = FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        else:
            digests.append(f"{digest(text)}  {name}\n")
    DIGESTS.write_text("".join(digests))


def texts_at(revision: str) -> dict[str, str]:
    """Return what the code and the recipes of a revision render. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packed = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder / "tree", filter="data")
        out = folder / "texts"
        subprocess.run([sys.executable, "-c", WRITE, out], cwd=folder / "tree", check=True)
        files = (path for path in out.rglob("*") if path.is_file())
        return {path.relative_to(out).as_posix(): path.read_text() for path in files}


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the unified differences of texts, those with the same lines changed said once."""
    groups: dict[str, list[str]] = {}
    for name in sorted(before.keys() | after.keys()):
        old, new = (each.get(name, "").splitlines() for each in (before, after))
        lines = list(difflib.unified_diff(old, new, lineterm="", n=2))[2:]
        # Without the numbers of lines, which keep the same change apart.
        text = "\n".join("@@" if line.startswith("@@ ") else line for line in lines)
        groups.setdefault(text, []).append(name)
    groups.pop("", None)
    return "".join("".join(f"=== {name}\n" for name in names) + f"{text}\n"
                   for text, names in groups.items())  # fmt: skip


def main() -> None:
    texts = {name: text for recipe in RECIPES for cluster in CLUSTERS
             for name, text in texts_of(recipe, cluster).items()}  # fmt: skip
    if len(sys.argv) > 1:
        sys.stdout.write(differences(texts_at(sys.argv[1]), texts))
        return
    known = read_digests() if DIGESTS.exists() else {}
    changed = [name for name in known if name in texts and digest(texts[name]) != known[name]]
    write(texts)
    if changed:
        before = texts_at("HEAD")
        sys.stdout.write(differences({name: before.get(name, "") for name in changed},
                                     {name: texts[name] for name in changed}))  # fmt: skip


if __name__ == "__main__":
    main()
