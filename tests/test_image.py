"""The image that Kubernetes manifests name: its recipe, and the script that builds it.

No builder of images is needed: docker/Dockerfile is read, and the slow test follows its lines
in a folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from docker.utils import exclude_paths
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.job.cluster import K8sCluster
from launcher.support import DEFAULT_IMAGE
from tests.launcher.shipped import shipped_job

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "scripts" / "build-image.sh"
INSTALL_TORCH = ROOT / "scripts" / "install-torch.sh"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
VERSION = importlib.metadata.version("training-recipes")
TAG = f"training-recipes:{VERSION}"


class Line(NamedTuple):
    instruction: str
    value: str

    @property
    def words(self) -> list[str]:
        return self.value.split()


def dockerfile() -> list[Line]:
    parser = DockerfileParser(str(ROOT / "docker"))
    return [Line(line["instruction"], line["value"]) for line in parser.structure
            if line["instruction"] != "COMMENT"]  # fmt: skip


def sent_to_builder() -> set[str]:
    """Return the paths of the checkout that .dockerignore lets through."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    return set(exclude_paths(str(ROOT), patterns))


def copied() -> list[tuple[list[str], str]]:
    """Return sources and target of each COPY from the checkout."""
    return [(line.words[:-1], line.words[-1]) for line in dockerfile()
            if line.instruction == "COPY" and "--from=build" not in line.words]  # fmt: skip


def test_every_copied_path_reaches_the_builder() -> None:
    sources = [source for names, _ in copied() for source in names]

    assert "launcher" in sources
    assert [name for name in sources if not (ROOT / name).exists()] == []
    assert set(sources) - sent_to_builder() == set()


def test_only_what_is_copied_reaches_the_builder() -> None:
    wanted = tuple(source for names, _ in copied() for source in names)
    # docker sends the two files that say what to do as well.
    paths = sent_to_builder() - {".dockerignore", "scripts"}

    assert [path for path in paths if not path.startswith(wanted) or "__pycache__" in path] == []


def test_every_variable_is_declared_in_its_stage() -> None:
    undeclared = []
    before_stages: set[str] = set()
    declared = before_stages
    for line in dockerfile():
        if line.instruction == "FROM":
            declared = {"PATH"}
            known = before_stages
        else:
            known = declared
        used = set(re.findall(r"\$\{?([A-Za-z_]+)", line.value))
        undeclared += [f"{line.instruction}: {name}" for name in used - known]
        if line.instruction in {"ARG", "ENV"}:
            declared |= {word.partition("=")[0] for word in line.words}

    assert undeclared == []


def test_makefile_gives_every_argument() -> None:
    _, _, target = (ROOT / "Makefile").read_text().partition("\nimage:\n")
    given = re.findall(r'"(\w+)=\$\(\1\)"', target)

    assert set(given) == {line.words[0].partition("=")[0] for line in dockerfile()
                          if line.instruction == "ARG"}  # fmt: skip


def test_extras_of_the_image_exist() -> None:
    [extras] = re.findall(r'"\.\[(.*?)\]"', "\n".join(line.value for line in dockerfile()))
    known = importlib.metadata.metadata("training-recipes").get_all("Provides-Extra")

    assert set(extras.split(",")) <= set(known or ())


def test_image_has_one_hashed_version_of_what_its_extras_ask_for() -> None:
    """But for torch, whose builds differ by accelerator."""
    text = "\n".join(line.value for line in dockerfile())
    [extras] = re.findall(r'"\.\[(.*?)\]"', text)
    blocks = re.split(r"\n(?=\w)", (ROOT / "constraints" / "image.txt").read_text())[1:]
    pins = [Requirement(block.partition("\\")[0]) for block in blocks]
    wanted = [Requirement(each) for each in importlib.metadata.requires("training-recipes") or ()]

    assert "--require-hashes --no-deps -r constraints/image.txt" in text
    assert [block for block in blocks if "--hash=sha256:" not in block] == []
    for each in wanted:
        asked = not each.marker or any(
            each.marker.evaluate({"extra": e}) for e in extras.split(",")
        )
        if not asked or each.name in ("torch", "training-recipes"):
            continue
        found = [pin for pin in pins if canonicalize_name(pin.name) == canonicalize_name(each.name)]
        versions = [next(iter(pin.specifier)).version for pin in found]
        assert versions, each
        assert [one for one in versions if one not in each.specifier] == [], each


def test_image_runs_as_the_number_that_pods_have() -> None:
    cluster = shipped_job("llama/llama3_tiny_pretrain", "job").cluster
    assert isinstance(cluster, K8sCluster)
    own = cluster.security

    last = dockerfile()[-1]

    assert (last.instruction, last.value) == ("USER", f"{own.run_as_user}:{own.run_as_group}")


def test_default_image_has_the_version_of_the_project() -> None:
    assert DEFAULT_IMAGE == TAG


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class Programs(NamedTuple):
    """A folder for PATH with a few programs; those made here write their arguments down."""

    folder: Path

    def add(self, *names: str) -> None:
        for name in names:
            write_program(self.folder / name, f"""printf '%s\\n' "$0" "$@" >{self.folder}/argv""")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env={"PATH": str(self.folder)}, cwd=ROOT, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip

    def recorded(self) -> list[str]:
        program, *arguments = (self.folder / "argv").read_text().splitlines()
        return [Path(program).name, *arguments]


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """Return a folder with what the scripts call, and with no builder of images."""
    for name in ("sed", "dirname", "sh", "bash", "grep", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    return Programs(tmp_path)


@pytest.mark.parametrize(
    ("present", "used"),
    [
        pytest.param(("docker", "podman", "buildah"), "docker", id="docker-first"),
        pytest.param(("podman", "buildah"), "podman", id="podman-second"),
        pytest.param(("buildah",), "buildah", id="buildah-last"),
    ],
)
def test_first_builder_on_path_builds_the_tag_of_this_version(
    programs: Programs, present: tuple[str, ...], used: str
) -> None:
    programs.add(*present)

    done = programs.run(str(BUILD), "TORCH_VERSION=1.2", "BASE=", "ACCELERATOR=cuda")

    assert done.returncode == 0, done.stderr
    assert programs.recorded() == [
        used, "build", "-f", f"{ROOT}/docker/Dockerfile", "-t", TAG,
        "--build-arg", "TORCH_VERSION=1.2", "--build-arg", "ACCELERATOR=cuda", str(ROOT),
    ]  # fmt: skip


def test_without_a_builder_one_line_names_the_programs(programs: Programs) -> None:
    """And one that fails gives its status."""
    done = programs.run(str(BUILD), "TORCH_VERSION=1.2")
    write_program(programs.folder / "docker", "exit 7")

    assert programs.run(str(BUILD)).returncode == 7
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "build-image: none of docker, podman and buildah is on PATH; install one of them\n"
    )


def test_make_image_passes_its_variables_on(programs: Programs) -> None:
    programs.add("podman")

    done = programs.run(str(shutil.which("make")), "image", "ACCELERATOR=cuda",
                        "TORCH_INDEX=file:///index", "BASE=team/base:1")  # fmt: skip

    assert done.returncode == 0, done.stderr
    arguments = programs.recorded()
    assert {"ACCELERATOR=cuda", "TORCH_INDEX=file:///index", "BASE=team/base:1"} <= set(arguments)
    [version] = [word for word in arguments if word.startswith("TORCH_VERSION=")]
    assert re.fullmatch(r"TORCH_VERSION=\d+\.\d+\.\d+", version)


@pytest.mark.parametrize(
    ("words", "has_driver", "wanted"),
    [
        pytest.param(("", "cpu"), True, ["torch==1.2+cpu"], id="cpu"),
        pytest.param(("", "cuda"), False, ["torch==1.2"], id="cuda-without-a-driver"),
        pytest.param(("file:///index", "cuda"), False,
                     ["--extra-index-url", "file:///index", "torch==1.2"], id="cuda-of-an-index"),
        pytest.param((), False, ["torch==1.2+cpu"], id="as-the-machine-without-a-driver"),
        pytest.param((), True, ["torch==1.2"], id="as-the-machine-with-a-driver"),
    ],
)  # fmt: skip
def test_torch_is_the_build_for_the_accelerator(
    programs: Programs, words: tuple[str, ...], has_driver: bool, wanted: list[str]
) -> None:
    programs.add("python")
    if has_driver:
        write_program(programs.folder / "nvidia-smi", "exit 0")

    done = programs.run(str(INSTALL_TORCH), "python", "1.2", *words)

    assert done.returncode == 0, done.stderr
    assert programs.recorded()[-len(wanted) - 1 :] == ["install", *wanted]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("1.2", "", "tpu"), "ACCELERATOR is 'tpu'; allowed: cpu, cuda", id="unknown"),
        pytest.param(("",), "the version is empty; give TORCH_VERSION=...", id="no-version"),
    ],
)
def test_torch_without_a_known_build_is_refused(
    programs: Programs, words: tuple[str, ...], message: str
) -> None:
    programs.add("python")

    done = programs.run(str(INSTALL_TORCH), "python", *words)

    assert done.returncode == 2
    assert done.stderr == f"install-torch: {message}\n"
    assert not (programs.folder / "argv").exists()


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    done = subprocess.run([SHELLCHECK, BUILD, INSTALL_TORCH], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


class Follower:
    """Follows the Dockerfile's lines below a folder, as this machine's user, without isolation."""

    def __init__(self, folder: Path, arguments: dict[str, str]) -> None:
        self.folder = folder
        self._arguments = arguments
        base = {name: value for name, value in os.environ.items()
                if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}  # fmt: skip
        # The base image's Python.
        self._base = {**base, "PATH": f"{sys.base_prefix}/bin:{os.defpath}"}
        self.env = dict(self._base)
        self._workdir = folder

    def follow(self, line: Line) -> None:
        if line.instruction == "FROM":
            self.env = dict(self._base)
            self._workdir = self.folder
        elif line.instruction == "WORKDIR":
            self._workdir = Path(self._place(line.value))
            self._workdir.mkdir(parents=True)
        elif line.instruction == "ARG":
            name, is_set, default = line.value.partition("=")
            if name in self._arguments or is_set:
                self.env[name] = self._arguments.get(name, default)
        elif line.instruction == "ENV":
            pairs = [word.split("=", 1) for word in self._place(line.value).split()]
            self.env |= {name: value.replace("$PATH", self.env["PATH"]) for name, value in pairs}
        elif line.instruction == "COPY" and "--from=build" not in line.words:
            self._copy(line.words[:-1], line.words[-1])
        elif line.instruction == "RUN":
            self.run("sh", "-c", self._place(line.value), folder=self._workdir)

    def run(self, *words: str, folder: Path) -> str:
        done = subprocess.run(words, cwd=folder, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _place(self, value: str) -> str:
        return re.sub(r"(?<![\w.])/(?=build|opt/|run/)", f"{self.folder}/", value)

    def _copy(self, sources: list[str], target: str) -> None:
        for path in sorted(sent_to_builder()):
            for source in sources:
                inside = path == source or path.startswith(f"{source}/")
                if not inside or not (ROOT / path).is_file():
                    continue
                rest = Path(source).name if target.endswith("/") else ""
                place = self._workdir / target / rest / Path(path).relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, place)


def test_the_project_is_compiled_once_for_any_time_stamps(tmp_path: Path) -> None:
    """Also where PYTHONDONTWRITEBYTECODE has no start keep what it compiles."""
    (line,) = (each for each in dockerfile() if "compileall" in each.value)
    packages = tmp_path / "opt" / "venv" / "lib" / "python3.99" / "site-packages"
    modules = [
        packages / name / "__init__.py" for name in ("launcher", "resilience", "recipes_training")
    ]
    for path in modules:
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "opt" / "venv" / "bin").mkdir()
    (tmp_path / "opt" / "venv" / "bin" / "python").symlink_to(sys.executable)
    image = Follower(tmp_path, {})
    image.env["PYTHONDONTWRITEBYTECODE"] = "1"

    image.follow(line)

    for path in modules:
        compiled = Path(importlib.util.cache_from_source(str(path))).read_bytes()
        assert compiled[4:8] == (1).to_bytes(4, "little"), "it is checked against its source"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_lines_of_the_dockerfile_make_an_environment_that_renders(tmp_path: Path) -> None:
    [version] = re.findall(
        r"^TORCH_VERSION \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    image = Follower(tmp_path / "image", {"TORCH_VERSION": version})
    image.folder.mkdir()

    for line in dockerfile():
        image.follow(line)

    python = ("python", "-c")
    modules = "import launcher, resilience, recipes_training, torch"
    where = image.run(*python, f"{modules}; print(launcher.__file__)", folder=empty)
    assert where.startswith(f"{image.folder}/opt/venv/")
    found = image.run(*python, f"{modules}; print(torch.__version__)", folder=empty)
    assert found.partition("+")[0].strip() == version
    assert "llama/llama3_tiny_pretrain" in image.run("python", "-m", "launcher", "list",
                                                     folder=empty)  # fmt: skip
    image.run("python", "-m", "launcher", "recipe=llama/llama3_tiny_pretrain", "cluster=k8s",
              folder=empty)  # fmt: skip
    [manifest] = empty.rglob("manifest.yaml")
    assert f'image: "{TAG}"' in manifest.read_text()
