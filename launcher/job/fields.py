"""Field types that recipes share: names, sizes, times, environment variables.

Every type names what it allows in its error, because that text is all that a
person who mistyped a recipe gets to see. Nothing here reads a file or a clock.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from ipaddress import ip_network
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from launcher.written.texts import to_text

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_SUBDOMAIN = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_IMAGE = (
    r"([A-Za-z0-9.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*"
    r"(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_TIME_LIMIT = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<hours>\d{1,3}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)"
)


class Section(BaseModel):
    """A part of a job: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def matching(pattern: str, allowed: str, *, most: int | None = None) -> Callable[[str], str]:
    """Return a check that accepts text of a form, of at most so many characters."""
    form = re.compile(pattern)

    def check(value: str) -> str:
        if (most is not None and len(value) > most) or not form.fullmatch(value):
            raise ValueError(f"allowed: {allowed}")
        return value

    return check


check_dns_label = matching(
    _DNS_LABEL,
    "an RFC 1123 label, that is at most 63 of a-z, 0-9 and '-', "
    "beginning and ending with a letter or digit",
    most=63,
)
"""Accept an RFC 1123 label, as Kubernetes asks of names that become host names."""

check_dns_subdomain = matching(
    _DNS_SUBDOMAIN,
    "an RFC 1123 subdomain, that is a-z, 0-9, '-' and '.', "
    "beginning and ending with a letter or digit",
    most=253,
)
"""Accept an RFC 1123 subdomain: labels joined by dots."""


def check_label_key(value: str) -> str:
    """Accept a Kubernetes label or annotation key: an optional DNS prefix and a name."""
    prefix, slash, name = value.rpartition("/")
    is_prefix_valid = not slash or (len(prefix) <= 253 and re.fullmatch(_DNS_SUBDOMAIN, prefix))
    if not is_prefix_valid or len(name) > 63 or not re.fullmatch(_QUALIFIED, name):
        raise ValueError(
            "allowed: a name of at most 63 letters, digits, '-', '_' and '.', "
            "optionally after a DNS prefix and '/'"
        )
    return value


check_label_value = matching(
    rf"({_QUALIFIED})?",
    "at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
    most=63,
)
"""Accept a Kubernetes label value: empty, or plain characters."""

check_env_name = matching(
    r"[A-Za-z_][A-Za-z0-9_]*", "letters, digits and '_', not beginning with a digit"
)
"""Accept a name that a shell can export."""


def check_absolute_path(value: str) -> str:
    """Accept an absolute path without '..' and control characters."""
    # POSIX gives two slashes at the beginning a meaning of their own, so normpath keeps them.
    is_normal = posixpath.normpath(value) == value and not value.startswith("//")
    if not value.startswith("/") or not is_normal or not value.isprintable():
        raise ValueError("allowed: an absolute path without '..', '.', '//' and a '/' at its end")
    return value


def check_one_line(value: str) -> str:
    """Accept text that fits on one line and holds no control characters."""
    if not value or not value.isprintable():
        raise ValueError("allowed: one line of printable text")
    return value


def check_no_nul(value: str) -> str:
    """Accept text that a program can be given: any but the character NUL."""
    if "\0" in value:
        raise ValueError("allowed: text without the character NUL")
    return value


def shown(value: object) -> str:
    """Return a value as a person writes it in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def time_limit_seconds(value: str) -> int:
    """Return the seconds in a checked time limit, which is D-HH:MM:SS or HH:MM:SS."""
    found = _TIME_LIMIT.fullmatch(value)
    if found is None:
        raise ValueError("allowed: D-HH:MM:SS or HH:MM:SS, in quotes, such as '6-00:00:00'")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_time_limit(value: Any) -> Any:
    # YAML 1.1 reads an unquoted 10:00:00 as the number 36000.
    if isinstance(value, (int, str)) and time_limit_seconds(str(value)) <= 0:
        raise ValueError("allowed: more than zero seconds")
    return value


DnsLabel = Annotated[str, AfterValidator(check_dns_label)]
DnsSubdomain = Annotated[str, AfterValidator(check_dns_subdomain)]
LabelKey = Annotated[str, AfterValidator(check_label_key)]
LabelValue = Annotated[str, BeforeValidator(to_text), AfterValidator(check_label_value)]
EnvName = Annotated[str, AfterValidator(check_env_name)]
EnvValue = Annotated[str, BeforeValidator(to_text), AfterValidator(check_no_nul)]
ShellText = Annotated[str, AfterValidator(check_no_nul)]
AbsolutePath = Annotated[str, AfterValidator(check_absolute_path)]
Image = Annotated[
    str,
    AfterValidator(
        matching(_IMAGE, "a container image, [registry[:port]/]name[:tag][@sha256:digest]")
    ),
]
OneLine = Annotated[str, AfterValidator(check_one_line)]


def check_cidr(text: str) -> str:
    """Return a text that names a network of addresses; raises ValueError."""
    try:
        ip_network(text)
    except ValueError as error:
        raise ValueError("allowed: a network of addresses, as 10.0.0.0/8") from error
    return text


Cidr = Annotated[str, AfterValidator(check_cidr)]
TimeLimit = Annotated[str, BeforeValidator(_check_time_limit)]
# Kubernetes and torch keep counts in 32 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
