"""Batches that lie encrypted in the cache: AES-256-GCM with one data key a cache.

The data key comes from a `KeyService`: AWS KMS, or a file that holds a key from which it is
derived. What is needed to get the key again lies beside the batches in `key.wrapped`, so a process
asks the service once and never for a batch. A producer that makes a new data key empties the
segments that are there: no process could read them, or they are not encrypted.

Nothing here prints a key, or puts one into a message.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from resilience.data.errors import CacheKeyError, DamagedBatchError, WrongKeyError
from resilience.data.format import Buffer
from resilience.data.marker import write_text
from resilience.data.spec import ProducerSpec

if TYPE_CHECKING:
    from resilience.settings import CacheEncryption

KEY_NAME = "key.wrapped"
KEY_BYTES = 32
SEGMENTS = "segment-*"
"""Files of a cache that hold batches."""

_NONCE_BYTES = 12
_TAG_BYTES = 16
_CHECK_BYTES = 16
_SALT_BYTES = 32
_VERSION = 1
_KEY_FILE_BYTES_MAX = 4096
_ALLOWED = "32 bytes, or 64 hexadecimal digits, or base64 of 32 bytes"
# A local endpoint or AWS's answers within a second; who waits is the first batch.
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 10
_ATTEMPTS = 3
_WRONG_KEY_CODES = {"IncorrectKeyException", "InvalidCiphertextException"}


class KeyService(Protocol):
    """Makes data keys, and returns them again for their wrapped form.

    Both raise CacheKeyError where the service cannot be used.
    """

    def generate_data_key(self, key_id: str) -> tuple[bytes, bytes]:
        """Return a new data key of 32 bytes, plain and wrapped by the key with this name."""

    def decrypt(self, wrapped: bytes, key_id: str) -> bytes:
        """Return the plain data key; raises WrongKeyError where another key wrapped it."""


class AesGcmSealer:
    """Encrypts and decrypts the batches of one cache. One thread.

    The first `open` of a process gets the data key. A later one gets it again where
    another producer has meanwhile made a new one.
    """

    def __init__(self, keys: DataKeys, key: bytes | None = None) -> None:
        self._keys = keys
        self._key = key

    def seal(self, parts: Iterable[Buffer], associated: bytes) -> bytes:
        """Return the parts, joined and encrypted: a nonce, the ciphertext, and its tag.

        Opening takes the same associated bytes, so these should say which batch it is. For a
        producer only.
        """
        if self._key is None:
            raise CacheKeyError("only the producer of a cache encrypts batches")
        # Random, because a batch that is made again must not repeat a nonce with other content.
        nonce = os.urandom(_NONCE_BYTES)
        encryptor = _cipher(self._key, nonce).encryptor()
        encryptor.authenticate_additional_data(associated)
        pieces = [nonce, *(encryptor.update(part) for part in parts), encryptor.finalize()]
        return b"".join([*pieces, encryptor.tag])

    def open(self, data: Buffer, associated: bytes) -> bytearray:
        """Return what was sealed, in memory of its own.

        Raises DamagedBatchError, and CacheKeyError where the key's service cannot be used.
        """
        opened = _open(self._key, data, associated)
        if opened is None and (key := self._keys.current()) != self._key:
            self._key = key
            opened = _open(key, data, associated)
        if opened is None:
            raise DamagedBatchError("an encrypted batch is damaged, or of another key")
        return opened

    def is_current(self) -> bool:
        """Return whether others get this key from the cache; without that they cannot read it."""
        try:
            return self._keys.current() == self._key
        except CacheKeyError:
            return False


def open_sealer(
    encryption: CacheEncryption, cache_folder: Path, *, is_producer: bool
) -> AesGcmSealer:
    """Return what encrypts and decrypts the batches of this cache.

    A producer, which has to hold the cache's lock, gets the data key here. Where there is
    none that it can use, it makes one and empties the segments that are there. A consumer
    gets the key with its first batch. Raises CacheKeyError.
    """
    if find_spec("cryptography") is None:
        raise CacheKeyError("encryption of batches needs the package's extra encryption")
    key_id = _key_id(encryption)
    service = _open_service(encryption, key_id, cache_folder.name)
    keys = DataKeys(service, encryption.kind, key_id, cache_folder)
    return AesGcmSealer(keys, keys.current() or keys.make() if is_producer else None)


def open_cache_sealer(spec: ProducerSpec, *, is_producer: bool) -> AesGcmSealer | None:
    """Return what encrypts and decrypts the batches of a producer's cache; None where none are."""
    if spec.encryption is None:
        return None
    # Here, as only who encrypts has to have what this imports.
    from resilience.settings import CacheEncryption

    encryption = CacheEncryption(**spec.encryption)
    return open_sealer(encryption, Path(spec.folder), is_producer=is_producer)


class DataKeys:
    """The data key of one cache, whose wrapped form lies in its folder."""

    def __init__(self, service: KeyService, kind: str, key_id: str, folder: Path) -> None:
        self._service = service
        self._kind = kind
        self._key_id = key_id
        self._folder = folder
        self._path = folder / KEY_NAME
        self._text: bytes | None = None
        self._key: bytes | None = None

    def current(self) -> bytes | None:
        """Return the data key that lies there; None where there is none that can be used.

        Asks the service only where the file is another than at the last call.
        """
        text = self._read()
        if text != self._text:
            self._key = None if text is None else self._unwrap(text)
            self._text = text
        return self._key

    def make(self) -> bytes:
        """Return a new data key, and leave no batch in the segments that are there."""
        plain, wrapped = self._service.generate_data_key(self._key_id)
        text = _wrapped_text(wrapped, self._kind, self._key_id)
        hidden = self._path.with_name(f".{self._path.name}")
        try:
            # First the batches: behind a crash between the two, there is none of another key.
            for segment in self._folder.glob(SEGMENTS):
                # A new file, as others have the old one mapped; and an empty one, so that a
                # consumer never meets other batches under a name that it knows.
                segment.unlink(missing_ok=True)
                segment.touch(0o600)
            hidden.unlink(missing_ok=True)
            write_text(hidden, text)
            hidden.replace(self._path)
        except OSError as error:
            raise CacheKeyError(f"cannot write {self._path}: {error.strerror}") from error
        self._text, self._key = text.encode(), plain
        return plain

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheKeyError(f"cannot read {self._path}: {error.strerror}") from error

    def _unwrap(self, text: bytes) -> bytes | None:
        wrapped = _parse_wrapped(text, self._kind, self._key_id)
        if wrapped is None:
            return None
        try:
            return self._service.decrypt(wrapped, self._key_id)
        except WrongKeyError:
            return None


@dataclass(frozen=True, slots=True)
class FileKeys:
    """Data keys that are derived from a key in a file by HKDF.

    The wrapped form is the salt, and a check by which another key is told at once.
    """

    context: str
    """What the keys are for: the same salt gives another key elsewhere."""

    def generate_data_key(self, key_id: str) -> tuple[bytes, bytes]:
        """Return a new data key and its wrapped form; the key's name is the file's path."""
        salt = os.urandom(_SALT_BYTES)
        plain, check = self._derive(salt, key_id)
        return plain, salt + check

    def decrypt(self, wrapped: bytes, key_id: str) -> bytes:
        """Return the data key again."""
        plain, check = self._derive(wrapped[:_SALT_BYTES], key_id)
        if wrapped[_SALT_BYTES:] != check:
            raise WrongKeyError(f"the data key is not of the key in {key_id}")
        return plain

    def _derive(self, salt: bytes, key_id: str) -> tuple[bytes, bytes]:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = f"batch cache {_VERSION} {self.context}".encode()
        derive = HKDF(SHA256(), KEY_BYTES + _CHECK_BYTES, salt, info)
        derived = derive.derive(read_key_file(Path(key_id)))
        return derived[:KEY_BYTES], derived[KEY_BYTES:]


class KmsKeys:
    """Data keys of AWS KMS, or of a server that speaks its protocol.

    Credentials come from where the AWS clients look for them.
    """

    def __init__(self, context: str, endpoint: str | None, region: str | None) -> None:
        self._context = {"batch-cache": context}
        self._endpoint = endpoint
        self._region = region

    def generate_data_key(self, key_id: str) -> tuple[bytes, bytes]:
        """Return a new data key that KMS has made."""
        with _kms_words(key_id):
            answer = self._client().generate_data_key(
                KeyId=key_id, NumberOfBytes=KEY_BYTES, EncryptionContext=self._context
            )
        return answer["Plaintext"], answer["CiphertextBlob"]

    def decrypt(self, wrapped: bytes, key_id: str) -> bytes:
        """Return the data key again."""
        with _kms_words(key_id):
            answer = self._client().decrypt(
                KeyId=key_id, CiphertextBlob=wrapped, EncryptionContext=self._context
            )
        plain: bytes = answer["Plaintext"]
        return plain

    def _client(self) -> Any:
        # Without types of its own; and only who uses KMS has to have it.
        config = import_module("botocore.config").Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        )
        return import_module("boto3").client(
            "kms", endpoint_url=self._endpoint, region_name=self._region, config=config
        )


def read_key_file(path: Path) -> bytes:
    """Return the 32 bytes of a key file that others may not read; raises CacheKeyError."""
    where = f"encryption.key_file {path}"
    try:
        # Without waiting: a pipe would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CacheKeyError(f"{where} is no file")
            if mode := stat.S_IMODE(status.st_mode) & 0o007:
                raise CacheKeyError(
                    f"{where} is open to everybody (its mode ends in {mode}); "
                    "take that away with chmod o=, or give its Secret defaultMode: 0440"
                )
            content = file.read(_KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CacheKeyError(f"cannot read {where}: {reason}") from error
    key = _parse_key(content)
    if key is None:
        raise CacheKeyError(f"{where} holds {len(content)} bytes that are no key: {_ALLOWED}")
    return key


def _parse_key(content: bytes) -> bytes | None:
    if len(content) == KEY_BYTES:
        return content
    text = content.strip()
    if re.fullmatch(rb"[0-9A-Fa-f]{64}", text):
        return bytes.fromhex(text.decode())
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
    return key if len(key) == KEY_BYTES else None


def _key_id(encryption: CacheEncryption) -> str:
    name = "key_file" if encryption.kind == "file" else "kms_key_id"
    key_id = encryption.key_file if encryption.kind == "file" else encryption.kms_key_id
    if key_id is None:
        raise CacheKeyError(f"encryption.{name} null: encryption.kind {encryption.kind!r} needs it")
    return key_id


def _open_service(encryption: CacheEncryption, key_id: str, context: str) -> KeyService:
    if encryption.kind == "kms":
        if find_spec("boto3") is None:
            raise CacheKeyError("encryption.kind 'kms' needs the package's extra encryption")
        return KmsKeys(context, encryption.endpoint, encryption.region)
    # Now, when the person who has to mend the file is still near.
    read_key_file(Path(key_id))
    return FileKeys(context)


@contextmanager
def _kms_words(key_id: str) -> Iterator[None]:
    """Raise what boto3 raises as errors of the cache."""
    errors = import_module("botocore.exceptions")
    try:
        yield
    except (errors.BotoCoreError, errors.ClientError) as error:
        # The errors of an answer have one; those of the way to the service have none.
        code = getattr(error, "response", {}).get("Error", {}).get("Code")
        kind = WrongKeyError if code in _WRONG_KEY_CODES else CacheKeyError
        raise kind(f"KMS with encryption.kms_key_id {key_id}: {error}") from error


def _wrapped_text(wrapped: bytes, kind: str, key_id: str) -> str:
    content = {
        "version": _VERSION,
        "kind": kind,
        "key_id": key_id,
        "wrapped": base64.b64encode(wrapped).decode(),
    }
    return json.dumps(content, sort_keys=True) + "\n"


def _parse_wrapped(text: bytes, kind: str, key_id: str) -> bytes | None:
    """Return the wrapped key; None where it is damaged, or not of this key."""
    try:
        content = json.loads(text)
        if (content["version"], content["kind"], content["key_id"]) != (_VERSION, kind, key_id):
            return None
        return base64.b64decode(content["wrapped"], validate=True)
    except (ValueError, TypeError, KeyError):
        return None


def _cipher(key: bytes, nonce: bytes, tag: bytes | None = None) -> Any:
    # Takes longer to import than a batch takes to read, so only who encrypts imports it.
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    return Cipher(AES(key), GCM(nonce, tag))


def _open(key: bytes | None, sealed: Buffer, associated: bytes) -> bytearray | None:
    """Return what was sealed; None where the bytes, the key or the associated ones are others."""
    from cryptography.exceptions import InvalidTag

    data = memoryview(sealed)
    if key is None or data.nbytes < _NONCE_BYTES + _TAG_BYTES:
        return None
    nonce, content = data[:_NONCE_BYTES], data[_NONCE_BYTES:-_TAG_BYTES]
    decryptor = _cipher(key, bytes(nonce), bytes(data[-_TAG_BYTES:])).decryptor()
    decryptor.authenticate_additional_data(associated)
    # It asks for as much room as a cipher of whole blocks would need.
    opened = bytearray(content.nbytes + _TAG_BYTES)
    num_bytes = decryptor.update_into(content, opened)
    try:
        decryptor.finalize()
    except InvalidTag:
        return None
    del opened[num_bytes:]
    return opened
