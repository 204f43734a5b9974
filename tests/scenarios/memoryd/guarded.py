"""Two nodes with a token and all doors open, for those who should not come in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.tiered.client import TieredClient
from resilience.tiered.frames import FrameSocket
from tests.ports import free_ports
from tests.resilience.tiered.cluster import Cluster, count_held, make_cluster
from tests.resilience.tiered.daemons import (
    LIMIT_S,
    MIB,
    Daemon,
    ask,
    load,
    make_content,
    make_id,
    save,
)
from tests.resilience.tiered.http_client import Client
from tests.resilience.tiered.kept import wait_until
from tests.resilience.tiered.memoryd.test_peers import connect, hello
from tests.scenarios.memoryd.process_use import read_use
from tests.tokens import write_token

TOKEN = "a token that nobody guesses"
BUDGET_MIB = 32
EXTRA_BYTES = 48 * MIB
"""What strangers may cost of the daemon's memory beside its budget: buffers and threads."""
BEARER = f"Bearer {TOKEN}"


@dataclass
class Guarded:
    """Node a, which is attacked, and node b, its peer."""

    cluster: Cluster
    folder: Path
    """All that belongs to the daemons is in it."""
    http_port: int
    step: int = 0
    _opened: ExitStack = field(default_factory=ExitStack)

    @property
    def daemon(self) -> Daemon:
        return self.cluster["a"]

    def http(self) -> Client:
        return self._opened.enter_context(Client(("127.0.0.1", self.http_port)))

    def local(self) -> FrameSocket:
        return self.daemon.connect()

    def peer(self) -> FrameSocket:
        """Return a connection that has passed the door for other nodes."""
        connection = connect(self.cluster.ports["a"], TOKEN)
        self._opened.callback(connection.close)
        return connection

    def known_peer(self) -> FrameSocket:
        """Return one that has said which node it is."""
        connection = self.peer()
        assert ask(connection, hello()).get("node") == "a"
        return connection

    def known_local(self) -> FrameSocket:
        connection = self.local()
        assert ask(connection, local_hello(TOKEN)).get("node") == "a"
        return connection

    def serve(self, worker: TieredClient, aws: Client) -> None:
        """Show that clients who are in, and the other node, are served as ever."""
        self.step += 1
        shard_id = make_id(self.step)
        content = make_content(MIB, self.step)
        save(worker, shard_id, content)
        assert load(worker, shard_id) == content
        wait_until(lambda: count_held(self.cluster["b"], shard_id) == 1)
        path = "/v1/cp/namespaces/theirs"
        assert aws.ask("GET", path, Authorization=BEARER).status == 200

    def log_in(self) -> tuple[TieredClient, Client]:
        """Return clients of both doors that are known."""
        aws = self.http()
        path = "/v1/cp/namespaces/theirs?num_ranks=1&steps_retained=3"
        assert aws.ask("POST", path, b"", Authorization=BEARER).status == 201
        return self.daemon.client(token=TOKEN), aws

    def pss_bytes(self) -> int:
        return read_use(self.daemon.process).pss_bytes

    def end(self) -> str:
        """End node a in order; returns all that it has said."""
        assert self.daemon.end() == 0
        return self.daemon.outputs[-1]

    def close(self) -> None:
        self._opened.close()


@contextmanager
def make_guarded(tmp_path: Path, *options: str) -> Iterator[Guarded]:
    """Start both nodes."""
    folder = tmp_path / "nodes"
    folder.mkdir()
    token_file = tmp_path / "token"
    write_token(token_file, TOKEN + "\n")
    (port,) = free_ports(1)
    words = ("--token-file", str(token_file), *options)
    with make_cluster(folder, budget_mib=BUDGET_MIB, options=words) as cluster:
        for daemon in cluster.nodes.values():
            daemon.token = TOKEN
            daemon.is_real = True  # its memory is measured
        cluster["a"].start("--http", f"127.0.0.1:{port}")
        cluster["b"].start()
        guarded = Guarded(cluster, folder, port)
        try:
            yield guarded
        finally:
            guarded.close()


def local_hello(token: object, **changes: object) -> dict[str, Any]:
    return {"op": "hello", "token": token, "namespace": "run", "job": "job", **changes}


def is_ended(connection: FrameSocket) -> bool:
    """Wait for the other end's word; True where it has ended the connection."""
    try:
        connection.receive(timeout_s=LIMIT_S)
    except ConnectionError:
        return True
    return False
