"""TLS of a run: who gets through the handshake, and what derives from the token."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from resilience.runtime import tls as module
from resilience.runtime.door import AGENTS, DAEMONS, DoorError
from resilience.runtime.tls import Tls, derive_pair, derive_tls, read_tls, shake_hands

TOKEN, OTHER = "of this run", "of another run"
ROOT = Path(__file__).parents[3]
PRINT = """
import sys
from resilience.runtime.tls import derive_pair
print(derive_pair(sys.argv[1]))
"""


def problems(tls: Tls, word: str = "word") -> list[str]:
    """Return what ends a client's handshake with an agent that has TLS, and what the agent says."""
    found = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        called = socket.create_connection(listening.getsockname(), timeout=10)
        accepted, _ = listening.accept()
    accepted.settimeout(10)

    def serve() -> None:
        with derive_tls(TOKEN).wrap(accepted, word="word", connects=False) as server:
            try:
                shake_hands(server, AGENTS)
                server.sendall(b"inside")
            except (OSError, DoorError) as error:
                found.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    with tls.wrap(called, word=word, connects=True) as connection:
        try:
            shake_hands(connection, AGENTS)
            # Of TLS 1.3 a client hears only now that its certificate was not taken.
            found.insert(0, connection.recv(16).decode())
        except (OSError, DoorError) as error:
            found.insert(0, str(error))
    thread.join()
    return found


def trusting(context: ssl.SSLContext) -> Tls:
    """Return TLS of a stranger, who looks at no certificate."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return Tls(context, context)


def test_who_knows_the_token_gets_in() -> None:
    assert problems(derive_tls(TOKEN)) == ["inside"]


def test_nobody_else_gets_in() -> None:
    """Not with another run's certificate, nor one of its own, nor none, nor by an older TLS."""
    other, older = derive_tls(OTHER), derive_tls(TOKEN).client
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    assert problems(other)[0] == AGENTS.unproven
    assert problems(trusting(other.client))[1] == AGENTS.unproven
    assert problems(trusting(nobody))[1] == AGENTS.unproven
    assert problems(Tls(older, older))[1] == "TLS has failed: unsupported protocol"


def test_a_handshake_for_another_door_is_refused() -> None:
    """A host between members cannot join one's door and another's TLS."""
    assert problems(derive_tls(TOKEN), "other")[0] == "TLS has failed: tlsv1 unrecognized name"


def test_an_end_that_does_not_answer_is_told_of_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        called = socket.create_connection(listening.getsockname(), timeout=0.1)
        raises = pytest.raises(TimeoutError, match=r"^the other side does not answer$")
        with derive_tls(TOKEN).wrap(called, word="word", connects=True) as connection, raises:
            shake_hands(connection, DAEMONS)


def test_each_node_makes_the_same_certificate() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", PRINT, token],
            cwd=ROOT, env={**os.environ, "TZ": zone}, check=True, capture_output=True, text=True,
        ).stdout
        for token, zone in ((TOKEN, "UTC"), (TOKEN, "Asia/Tokyo"), (OTHER, "UTC"))
    ]  # fmt: skip

    assert told[0] == told[1] == f"{derive_pair(TOKEN)}\n"
    assert told[2] == f"{derive_pair(OTHER)}\n" != told[0]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize("year", [1970, 2000, 2038, 2107, 9999])
def test_no_date_makes_the_certificate_invalid(tmp_path: Path, year: int) -> None:
    """As a node without a clock of its own has one."""
    pem = tmp_path / "pem"
    pem.write_bytes(derive_pair(TOKEN)[1])
    at_s = datetime.datetime(year, 1, 1, tzinfo=datetime.timezone.utc).timestamp()

    command = ["openssl", "verify", "-attime", f"{at_s:.0f}", "-CAfile", pem, pem]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{pem}: OK\n"


def test_the_key_is_in_no_file_and_is_none_of_the_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    load = ssl.SSLContext.load_cert_chain

    def watch(context: ssl.SSLContext, path: str) -> None:
        loaded.append((Path(path).readlink(), Path(path).read_bytes()))
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watch)
    before = sorted(Path("/proc/self/fd").iterdir())
    derive_tls(TOKEN)

    assert {str(each) for each, _ in loaded} == {"/memfd:tls (deleted)"}
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    key = load_pem_private_key(derive_pair(TOKEN)[0], None)
    assert isinstance(key, Ed25519PrivateKey)
    assert key.private_bytes_raw() not in {each.derive_key(TOKEN) for each in (AGENTS, DAEMONS)}


NO_TOKEN = "needs --token-file, since its keys derive from the token"
NO_PACKAGE = (
    "cryptography cannot be imported on this node: libssl is not there; install "
    "training-recipes[tls] on all nodes, or set cluster.tls=false"
)


@pytest.mark.parametrize(("token", "problem"), [("", NO_TOKEN), (TOKEN, NO_PACKAGE)])
def test_tls_that_cannot_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: str, problem: str
) -> None:
    def fail(token: str) -> Tls:
        raise ImportError("libssl is not there")

    monkeypatch.setattr(module, "derive_pair", fail)
    parser = argparse.ArgumentParser(prog="agent")

    assert read_tls(parser, is_asked=False, token=token) is None
    with pytest.raises(SystemExit) as ended:
        read_tls(parser, is_asked=True, token=token)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"agent: error: argument --tls: {problem}\n")
