"""Text that a person wrote comes out of a manifest as that text, whatever it holds.

The manifest is parsed again, and the strings that Kubernetes expands are
expanded by its own rules.
"""

from __future__ import annotations

import posixpath
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launcher.clusters.k8s.check import read_documents
from launcher.clusters.k8s.values import literal
from tests.launcher.k8s_job import KINDS, at, documents, k8s_job, manifest, pod

ODD = (
    "'\"", "a\nb", " x", "x ", "\tx", "\r\n", "$(HOME)", "$$(HOME)", "$", "$$", "${HOME}", "$(",
    "$\u00e9", "`id`", "{{ job.name }}", "{% raw %}", "a: b", "- a", "# x", "|", ">", "&a", "*a",
    "!!int 1", "%YAML", "---", "...", "null", "true", "0x1", "1e3", "=", "@", "[", "{", "\\", "\\n",
    "\x7f", "\x85", "\u2028", "\ufeff", "\U0001f600", "\x01", "\x1b[0m", "", "\n", "a\n\n", "\na",
)  # fmt: skip

# Surrogates are no text, since nothing can write them in UTF-8, and no program can be given NUL.
anything = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30
) | st.lists(st.sampled_from(ODD), max_size=4).map("".join)
one_line = anything.map(lambda text: "".join(filter(str.isprintable, text)) or "x")
path = one_line.map(lambda text: posixpath.normpath(f"/x/{text.strip('/') or 'y'}"))


def expand(text: str, variables: dict[str, str]) -> str:
    """Expand $(NAME) as a kubelet does: $$ is a dollar sign, an unknown name stays."""
    result, rest = "", text.encode()
    done = b""
    while rest:
        head, dollar, rest = rest.partition(b"$")
        done += head
        if not dollar or not rest:
            done += dollar
        elif rest.startswith(b"$"):
            done, rest = done + b"$", rest[1:]
        elif rest.startswith(b"(") and b")" in rest:
            name, _, rest = rest[1:].partition(b")")
            known = variables.get(name.decode())
            done += known.encode() if known is not None else b"$(" + name + b")"
        else:
            # Its code takes one byte for one character here.
            done, rest = done + b"$" + chr(rest[0]).encode(), rest[1:]
    return result + done.decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(HOME)", "/root"), ("$$(HOME)", "$(HOME)"), ("$$$(HOME)", "$/root"), ("$(NO)", "$(NO)"),
        ("$(HOME", "$(HOME"), ("$HOME", "$HOME"), ("a$", "a$"), ("$\u00e9", "$\u00c3\ufffd"),
    ],
)  # fmt: skip
def test_expansion_has_the_rules_of_kubernetes(text: str, expanded: str) -> None:
    assert expand(text, {"HOME": "/root"}) == expanded


@given(anything)
@example("$\u00e9")
def test_literal_text_survives_expansion(text: str) -> None:
    assert expand(literal(text), {"HOME": "/root", "": "empty", "x": "y"}) == text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
def test_free_text_comes_back_as_it_was_written(kind: str, data: st.DataObject) -> None:
    value, annotation, script = (data.draw(anything) for _ in range(3))
    description = data.draw(one_line)
    words = data.draw(st.lists(anything, min_size=1, max_size=3))
    mount, host_path, run_path = (data.draw(path) for _ in range(3))
    job = k8s_job(kind, {
        "env": {"ODD": value},
        "recipe.description": description,
        "cluster.annotations": {"odd": annotation},
        "cluster.pre_script": script,
        "cluster.run_path": run_path,
        "cluster.probes.liveness": {"command": words},
        "cluster.host_paths": [{"path": host_path, "mount_path": mount}],
    })  # fmt: skip

    found = documents(job)
    container = at(pod(job), "spec containers 0")
    env = {"HOME": "/root"}

    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert expand(variables["ODD"], env) == value
    assert [expand(word, env) for word in at(container, "livenessProbe exec command")] == words
    assert container["volumeMounts"][1]["mountPath"] == mount
    assert at(pod(job), "spec volumes 1 hostPath path") == host_path
    metadata = found["job"]["metadata"]["annotations"]
    assert metadata["odd"] == annotation
    assert metadata["training-recipes/description"] == description
    assert found["ConfigMap"]["data"]["pre.sh"] == script
    assert found["ConfigMap"]["data"]["job.json"] == job.to_json()


@given(pattern=one_line, stop=one_line, mode=one_line)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
def test_free_text_of_hyperpod_comes_back(pattern: str, stop: str, mode: str) -> None:
    rule: dict[str, Any] = {"name": "r", "pattern": _escaped(pattern), "stop_pattern": stop}
    rule["stop_pattern"] = _escaped(stop)
    job = k8s_job("hyperpod", {
        "cluster.run_policy.log_monitoring": [rule], "cluster.run_policy.workload_mode": f"m{mode}",
    })  # fmt: skip

    policy = documents(job)["job"]["spec"]["runPolicy"]

    assert policy["logMonitoringConfiguration"][0] == {
        "name": "r", "logPattern": rule["pattern"], "stopPattern": rule["stop_pattern"],
    }  # fmt: skip
    assert policy["workloadMode"] == f"m{mode}"


def _escaped(text: str) -> str:
    """Return a pattern that compiles: the text with its special characters escaped."""
    return "".join(f"\\{mark}" if mark in r"\()[]{}*+?.^$|" else mark for mark in text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_both_parsers_of_yaml_read_the_same(kind: str, text: str) -> None:
    """What a cluster's parser makes of it must not hang on the one we check with."""
    rendered = manifest(k8s_job(kind, {"env": {"ODD": text}, "cluster.pre_script": text}))

    assert list(yaml.load_all(rendered, yaml.SafeLoader)) == read_documents(rendered)
