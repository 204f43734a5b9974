"""The command of one node's checkpoint daemon, the same on every cluster kind.

This is the one place that knows what memoryd is called with. Where it runs, and who starts it
again, is the cluster's own business.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from launcher.clusters.agent import number_text
from launcher.job import Job
from launcher.job.tiered_memory import budget_mib
from resilience.settings import StoreTier, TieredSettings

WAIT_S = 60
"""How long a node's agent waits for its daemon."""
PEER_PORT = 9201
"""Where each node has an address of its own and the recipe names no port; AWS's has 9200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorydWords:
    """Shell words, quoted already, that differ between cluster kinds and nodes."""

    python: str
    folder: str
    node: str
    token_file: str
    peer_listen: str
    """Address and port for the daemons of other nodes."""
    peers: tuple[str, ...]
    """Options that name those."""
    domain: str | None = None
    """What fails together with the node; None lets the daemon take the node alone."""
    drain_s: int | None = None
    """How long it may send to the store when it is to end; None leaves that to the daemon."""


def memoryd_settings(job: Job) -> TieredSettings | None:
    """Return the settings of a job that starts memoryd on its nodes, None of any other."""
    settings = job.resilience.tiered
    return settings if settings and settings.starts_memoryd else None


def token_secret_name(job: Job) -> str | None:
    """Return the Secret that a Kubernetes job's pods wait for, None where they wait for none."""
    settings = memoryd_settings(job)
    is_waited_for = job.cluster.kind == "k8s" and settings and settings.token_file is None
    return f"{job.name}-memoryd" if is_waited_for else None


def memoryd_command(job: Job, settings: TieredSettings, words: MemorydWords) -> tuple[str, ...]:
    """Return the shell words that start a node's daemon."""
    ram = settings.ram
    command = [
        words.python,
        "-m",
        "resilience.tiered.memoryd",
        f"--dir={words.folder}",
        f"--budget-mib={budget_mib(job, settings)}",
        f"--node={words.node}",
        f"--token-file={words.token_file}",
        f"--keep={ram.keep}",
        f"--domains-min={ram.domains_min}",
    ]
    if words.domain:
        command.append(f"--domain={words.domain}")
    if settings.http_port:
        # AWS's library sends no token; only processes of this node reach loopback.
        command += [f"--http=127.0.0.1:{settings.http_port}", "--http-open"]
    if job.num_nodes_started > 1:
        command += [f"--peer-listen={words.peer_listen}", f"--replicas={ram.replicas}"]
        command += words.peers
        if ram.peers_hold == "instead":
            command.append("--peers-hold=instead")
    if settings.store:
        command += _store_words(settings.store)
        if words.drain_s is not None:
            command.append(f"--drain-s={words.drain_s}")
    return tuple(command)


def wait_command(python: str) -> tuple[str, ...]:
    """Return the words that wait for the daemon that the environment names."""
    return python, "-m", "resilience.tiered", "wait", f"--timeout-s={WAIT_S}"


def _store_words(store: StoreTier) -> list[str]:
    assert store.url is not None, "the rules ask for one"
    every_s = None if store.every_s is None else number_text(store.every_s)
    given: dict[str, object] = {
        "store": shlex.quote(store.url),
        "store-every-n-steps": store.every_n_steps,
        "store-every-s": every_s,
        "store-keep": store.keep,
        "store-waiting-max": store.waiting_max,
        "store-deadline-s": number_text(store.deadline_s),
        "store-endpoint": store.endpoint and shlex.quote(store.endpoint),
        "store-region": store.region,
        "store-part-size-mib": store.part_size_mib,
        "store-attempts": store.attempts,
    }
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [*words, "--store-path-style"] if store.path_style else words
