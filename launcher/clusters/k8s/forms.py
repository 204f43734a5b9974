"""Forms of a manifest's texts and quantities that published schemas do not name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from launcher.job import fields

QUANTITY = "a quantity such as 4, 500m, 32Gi or 5120Mi"
_SHOWN_CHARACTERS = 80
_NUMBER = r"\+?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_QUANTITY = re.compile(rf"({_NUMBER})(|[numkMGTPE]|[KMGTPE]i)", re.ASCII)
_UNITS = {
    **{unit: Decimal(1000) ** power for power, unit in enumerate((*"num", "", *"kMGTPE"), -3)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def problem(where: str, value: object, allowed: str) -> str:
    """Return the one form that every message about a value has."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}..."
    return f"{where} {shown}; {allowed}"


def amount(value: object) -> Decimal:
    """Return a Kubernetes quantity, which is not negative, as a number. Raises ValueError."""
    is_written = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    found = _QUANTITY.fullmatch(str(value)) if is_written else None
    if found is None:
        raise ValueError(f"allowed: {QUANTITY}")
    return Decimal(found[1]) * _UNITS[found[2]]


def _check_node_label(value: str) -> None:
    fields.check_label_key(value)
    if value == "beta.kubernetes.io/instance-type":
        raise ValueError("allowed: 'node.kubernetes.io/instance-type'")


def _check_log_pattern(value: str) -> None:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"allowed: a regular expression: {error}") from error
    if groups > 1:
        raise ValueError(f"allowed: at most one group, and it has {groups}")


CHECKS: Mapping[str, Callable[[Any], object]] = {
    "absolute_path": fields.check_absolute_path,
    "dns_label": fields.check_dns_label,
    "dns_subdomain": fields.check_dns_subdomain,
    "env_name": fields.check_env_name,
    "label_key": fields.check_label_key,
    "label_value": fields.check_label_value,
    "log_pattern": _check_log_pattern,
    "node_label": _check_node_label,
    "quantity": amount,
}
"""Forms of texts that are more than a pattern."""
