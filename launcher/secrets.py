"""Recognise a secret that was written where only a reference may stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError

# Whole words of a name: TOKENIZERS_PARALLELISM and MAX_TOKENS are no secrets.
_WORDS = (
    r"(?:(?<![A-Z0-9])(?:(?<![EB]OS.)(?<!(?:PAD|UNK|SEP|CLS).)(?<!MASK.)TOKEN(?!_(?:LIMIT|BUDGET))"
    r"|SECRET|CRED(?:ENTIAL)?S?|(?:GH|GIT(?:HUB|LAB))_PAT|DOCKER_AUTH_CONFIG|CONNECTION_STRING"
    r"|REDISCLI_AUTH|(?:PRIVATE|API|ACCESS|SIGNING|WANDB|NGC"
    r"|(?:EN|DE)CRYPTION|MASTER|DEPLOY|AUTH|ACCOUNT|SHARED|STORAGE|LICENSE|SSH|HMAC|OPENAI"
    r"|ANTHROPIC|CLIENT|WEBHOOK)[_-]?KEYS?)|(?-i:(?<=[a-z])(?:Token|Secret|ApiKey|AccessKey))(?![a-z])"
    r"|PASSWORD|PASSWD|PASSPHRASE|PGPASS|SSHPASS|_PWD"
    r"|(?<!ONE)(?<!TWO)(?<!FIRST)(?<!SECOND)_PASS(?!_))(?![A-Z0-9])"
)
_NAME = re.compile(rf"(?i){_WORDS}")
# Whoever writes a path under such a name says where the secret is.
_PATH_NAME = re.compile(r"(?i)(_FILE|_PATH|_DIR|APPLICATION_CREDENTIALS)$")
# Of the workers' variables each key is a secret, but for these.
_KEY_NAME = re.compile(
    r"(?i)(?<!PUBLIC)(?<!PRIMARY)(?<!PARTITION)(?<!SORT)(?<!CACHE)(?<!TEXT)(?<!FOREIGN)_KEYS?$"
)
_SWITCH = re.compile(r"(?i)(true|false|null|none|\d)?")
# Of a shell's or another text: no reference, path or option, and no switch.
_VALUE = (
    r"""(?:\\?["'])?(?![\s"'`$/~.<>{(*=|&;\\-]|(?i:true|false|null|none|\d)?(?![^\s"',;&)}]))"""
)
# What follows an option in a sentence about it.
_PROSE = r"(?!(?:[a-z]{1,4}|[tw]here|below|above|instead|options?|flags?|should|which)\b(?![-=]))"
_FORMS = "|".join(
    (
        r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b",
        r"\b(?:hf|api_org|npm|r8|gsk|ntn|lin_api|glsa|rubygems)_[A-Za-z0-9]{20,}",
        r"\bdckr_[op]at_[\w-]{20,}|\bAGE-SECRET-KEY-1\w+",
        r"\b(?:glc|figd|sbp|pcsk|KGAT|nfp|dbtc|pnu|phx|sq[pu]|bkua|sntry[su])_[A-Za-z0-9]{20,}",
        r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}",
        r"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat|imt|agent)-[\w.-]{16,}",
        r"\bxox[a-z]-[\w-]{10,}|\bxapp-[\w-]{16,}|\bhooks\.slack\.com/services/\w+/\w+/\w+",
        r"\bpypi-AgE[\w-]{16,}|\bnvapi-[\w-]{16,}|\bxai-\w{20,}|\btskey-[\w-]{16,}",
        r"\bAIza[\w-]{30,}|\bya29\.[\w-]{16,}|\bGOCSPX-[\w-]{16,}",
        r"\bsk-(?=[\w-]*\d)[\w-]{20,}|\b[rs]k_(?:live|test)_\w{16,}|\bwhsec_\w{16,}",
        r"\bpplx-\w{20,}|\bLS0tLS1CRUdJTi(?:BQUklW|BSU0EgUFJJ|BPUEVOU1|BFQyBQ|BFTkNS|BQR1AgUFJJ)",
        r"\bdapi[0-9a-f]{32}|\bdo[opr]_v1_[0-9a-f]{32,}|\bhv[sb]\.[\w-]{20,}|\bshp[a-z]{2}_\w{20,}",
        r"\bSG\.[\w-]{16,}\.[\w-]{16,}|\bATATT3[\w-]{20,}|\bwandb_v1_\w{16,}",
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
        r"\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]{5,}",
    )
)
FORM = re.compile(_FORMS)
"""A secret that is known by its form, whatever is around it."""
_TEXT = re.compile(
    _FORMS
    # NAME=value, --name value, "name: value", and the header of a request.
    + rf"|(?i:{_WORDS})={_VALUE}|(?i:--[\w-]{{0,40}}{_WORDS})[ \t]+{_PROSE}{_VALUE}"
    rf"""|["'](?i:[\w-]{{0,40}}{_WORDS})\\?["']?[ ]?:[ ]*{_VALUE}"""
    rf"|(?i:\bAuthorization\W{{1,4}}(?:Bearer|Basic|Token)[ ]+){_VALUE}"
    r"|(?i:\bAuthorization\W{1,4}(?:\w+[ ]+)?)(?=[\w.~+/-]*\d)[\w.~+/-]{8,}"
    r"|\b(?i:Bearer)[ ]+(?=[\w.~+/-]*\d)[\w.~+/-]{8,}"
    # A URL's user with a password, or as long as a token; its signature.
    r"|://[^/?#\s:@]*:(?!\$)[^/?#\s@]+@|https?://(?!\$)[^/?#\s:@]{16,}@"
    rf"|[?&](?i:sig|X-\w+-Signature)={_VALUE}"
)
_REMEDY = "allowed: a reference under cluster.secrets{}, so that the value is in no file"


def held_secrets(content: object, place: tuple[Any, ...] = ()) -> Iterator[str]:
    """Yield a message for each secret in plain data that lies at a place, by its key or its form.

    A text that refers to another value is looked at when it has been followed.
    """
    for at, value in (*_leaves(content, place), *_joined(content, place)):
        written = ".".join(at).replace(".[", "[")
        key = _TEXT.sub("...", written)
        if _is_named(value, at):
            own = f".{at[-1]}" if at[0] == "env" else ""
            yield f"{key} holds a value (not shown); {_REMEDY.format(own)}"
        elif _is_plain(value, at) and not str(value).startswith("${"):
            entry = ".".join(at[:_SECRET_ENTRY_DEPTH])
            yield f"{entry} holds a value (not shown); allowed: where it is, {SECRET_FORMS}"
        elif key != written or _TEXT.search(str(value)):
            yield f"{key} looks like a secret (not shown); {_REMEDY.format('')}"


def check_secrets(content: object, path: Path, text: str, place: tuple[str, ...] = ()) -> None:
    """Refuse a secret that a file with this text holds, before Hydra shows or writes any of it.

    `content` is its plain data; `place` is the section that the file's keys lie in.
    """
    # Most files are told by their text alone, which costs little.
    if not ("secrets" in text or _NAME.search(text) or _TEXT.search(text)):
        return
    if problems := list(held_secrets(content, place)):
        raise RecipeError("\n".join(f"{path}: {problem}" for problem in problems))


def shown_override(override: str) -> str:
    """Return an override as a message may repeat it: without a value that may be a secret."""
    key, equals, _ = override.partition("=")
    is_shown = not (_UNSHOWN.match(key.lstrip("+~-")) or _NAME.search(key))
    return override if is_shown or not equals else f"{key}=(not shown)"


def masked(content: object, place: tuple[Any, ...] = ()) -> Any:
    """Return plain data that lies at a place with NOT_SHOWN for each value that may be a secret."""
    if isinstance(content, dict):
        return {key: masked(value, (*place, key)) for key, value in content.items()}
    if isinstance(content, list):
        return [masked(value, (*place, index)) for index, value in enumerate(content)]
    return NOT_SHOWN if _may_be_secret(content, tuple(map(str, place))) else content


def _may_be_secret(value: object, place: tuple[str, ...]) -> bool:
    if value is None or isinstance(value, bool) or value == "":
        return False
    if _TEXT.search(str(value)) or _is_named(value, place):
        return True
    if place[:2] == _SECRETS:
        return _is_plain(value, place)
    # A file's path, and num_experts_per_token.
    is_other = place[-1].endswith("_file") or place[-1].startswith("num_")
    return not is_other and any(_NAME.search(part) for part in place)


def _is_named(value: object, place: tuple[str, ...]) -> bool:
    """Return whether a value is that of a variable or label whose name says it is a secret."""
    if not value or re.fullmatch(_SWITCH, str(value)):
        return False
    if place[:1] == ("env",):
        is_path = str(value).startswith("/") and _PATH_NAME.search(place[-1])
        is_named = any(map(_NAME.search, place[1:])) or bool(_KEY_NAME.search(place[-1]))
        return not is_path and is_named
    if place[:2] == _ARGUMENTS:
        is_path = str(value).startswith("/") and _PATH_NAME.search(place[-1])
        return not is_path and any(map(_NAME.search, place[2:]))
    # Vault's annotations name the secrets that it is to fetch.
    is_label = place[:2] in _LABELS and not place[-1].startswith("vault.")
    return is_label and bool(re.search(rf"(?i){_WORDS}$", place[-1]))


def _is_plain(value: object, place: tuple[str, ...]) -> bool:
    """Return whether a value stands where cluster.secrets says where a secret is."""
    is_where = len(place) == _SECRET_ENTRY_DEPTH + 1 and place[-1] in _WHERE_KEYS
    return place[:2] == _SECRETS and value not in (None, {}) and not is_where


def _joined(node: object, place: tuple[Any, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each list as the text of its items where that is a secret, and no item is by itself."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _joined(value, (*place, str(key)))
    elif isinstance(node, list):
        words = [str(each) for each in node if not isinstance(each, (dict, list))]
        texts = [" ".join(words), *FORM.findall("".join(words))]
        if not any(map(_TEXT.search, words)):
            yield from ((place, text) for text in texts if _TEXT.search(text))
        for index, value in enumerate(node):
            yield from _joined(value, (*place, f"[{index}]"))


NOT_SHOWN = "(not shown)"
SECRET_FORMS = "as {file: PATH} or {} on Slurm and here, {name: SECRET, key: KEY} on Kubernetes"
_SECRETS = ("cluster", "secrets")
_ARGUMENTS = ("trainer", "arguments")
_SECRET_ENTRY_DEPTH = 3
_WHERE_KEYS = ("file", "name", "key")
_LABELS = (("cluster", "labels"), ("cluster", "annotations"))
_UNSHOWN = re.compile(r"(env|cluster\.secrets)\b")


def _leaves(node: object, place: tuple[Any, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each value of plain data that holds no others, with its place."""
    if node and isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, (*place, str(key)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, (*place, f"[{index}]"))
    else:
        yield place, node
