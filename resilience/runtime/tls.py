"""TLS between the processes of a run, whose keys and certificate all derive from the run's token.

Each process that knows the token makes the same key and, byte for byte, the same certificate, and
trusts no other one. So there is no authority, no file to hand out and no date to compare: the
certificate is valid from 1970 to 9999. The handshake names the word of the door before it, so it
cannot be carried to another connection.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
from dataclasses import dataclass
from datetime import datetime, timezone

from resilience.runtime.door import DoorError, DoorKind

NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Raised where a socket that does not wait has nothing to give, or takes nothing."""
_INFO = b"training-recipes tls 1"
_SEED_BYTES = 32
_FIRST = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LAST = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
_ENDED = "the other side has ended the connection"


class _Socket(ssl.SSLSocket):
    word: str
    """The word that the other end's first message has to have."""


@dataclass(frozen=True, slots=True)
class Tls:
    """What makes TLS of connections of a run."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    def wrap(self, connection: socket.socket, *, word: str, connects: bool) -> ssl.SSLSocket:
        """Return TLS over a connection, which it takes over, before its handshake.

        The end that connects says the `word` of its door, and the other end expects its own.

        Raises OSError where the other end has gone; the connection may be closed by then.
        """
        connection.getpeername()
        context = self.client if connects else self.server
        wrapped = context.wrap_socket(
            connection,
            server_side=not connects,
            do_handshake_on_connect=False,
            server_hostname=word if connects else None,
        )
        if isinstance(wrapped, _Socket):
            wrapped.word = word
        return wrapped


def shake_hands(connection: ssl.SSLSocket, kind: DoorKind) -> None:
    """Go through the handshake, or on with it; raises DoorError, OSError and what is NOT_YET."""
    try:
        connection.do_handshake()
    except NOT_YET:
        raise
    except TimeoutError as error:
        raise TimeoutError("the other side does not answer") from error
    except ssl.SSLError as error:
        reason = error.reason or ""
        if any(each in reason for each in ("CERTIFICATE", "UNKNOWN_CA")):
            raise DoorError(kind.unproven) from error
        raise ConnectionError(explain_tls(error)) from error


def explain_tls(error: Exception) -> str:
    """Return what an exception says, without the names of OpenSSL's files."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    reason = error.reason or ""
    if isinstance(error, ssl.SSLEOFError) or "ALERT_DECODE_ERROR" in reason:
        # OpenSSL's answer to a connection that ends without a word of TLS, as all of ours do.
        return _ENDED
    return f"TLS has failed: {reason.lower().replace('_', ' ') or error}"


def read_tls(parser: argparse.ArgumentParser, *, is_asked: bool, token: str) -> Tls | None:
    """Return what `--tls` asks for; ends the process with one message where it cannot be had."""
    if not is_asked:
        return None
    if not token:
        parser.error("argument --tls: needs --token-file, since its keys derive from the token")
    try:
        return derive_tls(token)
    except ImportError as error:  # not installed, or of no use here
        parser.error(
            f"argument --tls: cryptography cannot be imported on this node: {error}; install "
            "training-recipes[tls] on all nodes, or set cluster.tls=false"
        )


def derive_tls(token: str) -> Tls:
    """Return TLS for those who know a token: 1.3 alone, and both sides show the certificate."""
    key, certificate = derive_pair(token)
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(protocol)
        context.sslsocket_class = _Socket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # All have one certificate, which names none of them.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=certificate.decode())
        _load_pair(context, key + certificate)
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            # A connection that is resumed would show no certificate.
            context.num_tickets = 0
            context.sni_callback = _check_word
        contexts.append(context)
    return Tls(*contexts)


def _check_word(connection: object, word: str | None, _: ssl.SSLContext) -> int | None:
    is_right = isinstance(connection, _Socket) and word == connection.word
    return None if is_right else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


def derive_pair(token: str) -> tuple[bytes, bytes]:
    """Return the private key and the certificate in PEM; an Ed25519 signature draws nothing."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    seed = HKDF(hashes.SHA256(), _SEED_BYTES, salt=None, info=_INFO).derive(token.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "training run")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FIRST)
        .not_valid_after(_LAST)
        .sign(key, algorithm=None)
    )
    pem = serialization.Encoding.PEM
    form, sealing = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(pem, form, sealing), certificate.public_bytes(pem)


def _load_pair(context: ssl.SSLContext, pair: bytes) -> None:
    """Load key and certificate; ssl takes them from a file alone: it lies in memory, unnamed."""
    with os.fdopen(os.memfd_create("tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(pair)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
