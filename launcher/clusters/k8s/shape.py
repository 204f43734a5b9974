"""Small checks that tables of fields are made of.

A check takes a value and the path it stands at, and yields a message for
everything wrong: the path, the value, and what is allowed. A field that is
null counts as left out, as it does to Kubernetes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from launcher.composition.choice import nearest

Check = Callable[[Any, str], Iterator[str]]

_SHOWN_CHARACTERS = 80
_UNITS = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def problem(where: str, value: object, allowed: str) -> str:
    """Return the one form that every message about a value has."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}..."
    return f"{where} {shown}; {allowed}"


def anything(_value: Any, _where: str) -> Iterator[str]:
    """Accept any value: the field is known, and the cluster's to judge."""
    yield from ()


def text(value: Any, where: str) -> Iterator[str]:
    """Accept text, the empty one too."""
    if not isinstance(value, str):
        yield problem(where, value, "allowed: text")


def filled(value: Any, where: str) -> Iterator[str]:
    """Accept text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        yield problem(where, value, "allowed: text that is not empty")


def boolean(value: Any, where: str) -> Iterator[str]:
    """Accept true and false."""
    if not isinstance(value, bool):
        yield problem(where, value, "allowed: true, false")


def whole(low: int, high: int | None = None) -> Check:
    """Accept whole numbers from `low` to `high`."""
    allowed = f"allowed: a whole number of at least {low}" + (f", at most {high}" if high else "")

    def check(value: Any, where: str) -> Iterator[str]:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < low or (high is not None and value > high):
            yield problem(where, value, allowed)

    return check


def one_of(*allowed: str) -> Check:
    """Accept some words."""

    def check(value: Any, where: str) -> Iterator[str]:
        if value not in allowed:
            yield problem(where, value, f"allowed: {', '.join(map(repr, allowed))}")

    return check


def form(accept: Callable[[str], object]) -> Check:
    """Accept text for which a function of `launcher.job.fields` raises nothing."""

    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, str):
            yield problem(where, value, "allowed: text")
            return
        try:
            accept(value)
        except ValueError as error:
            yield problem(where, value, str(error))

    return check


def amount(value: object) -> Decimal | None:
    """Return a Kubernetes quantity as a number, None where it is none."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    word = str(value)
    number = word.rstrip("numkKMGTPEi")
    try:
        found = Decimal(number) * _UNITS[word[len(number) :]]
    except (InvalidOperation, KeyError):
        return None
    is_plain = number.isascii() and "_" not in number and number == number.strip()
    return found if is_plain and found.is_finite() else None


def quantity(value: Any, where: str) -> Iterator[str]:
    """Accept a quantity that is not negative."""
    found = amount(value)
    if found is None or found < 0:
        yield problem(where, value, "allowed: a quantity such as 4, 500m, 32Gi or 5120Mi")


def items(check: Check, *, least: int = 0, unique: str | None = None) -> Check:
    """Accept a list whose items pass; no two may have the same value of a field."""

    def check_list(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, list) or len(value) < least:
            yield problem(where, value, f"allowed: a list of at least {least} items")
            return
        seen = set()
        for index, item in enumerate(value):
            yield from check(item, f"{where}[{index}]")
            name = item.get(unique) if unique and isinstance(item, dict) else None
            if isinstance(name, str):
                if name in seen:
                    allowed = f"allowed: each {unique} once"
                    yield problem(f"{where}[{index}].{unique}", name, allowed)
                seen.add(name)

    return check_list


def mapping(key_check: Check, value_check: Check) -> Check:
    """Accept a mapping whose keys and values pass."""

    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield problem(where, value, "allowed: a mapping of keys to values")
            return
        for key, item in value.items():
            yield from key_check(key, f"{where} key")
            yield from value_check(item, f"{where}[{key!r}]")

    return check


def shape(
    fields: Mapping[str, Check], required: Collection[str] = (), rules: Collection[Check] = ()
) -> Check:
    """Accept a mapping of known fields that pass; `rules` join them.

    The rules see the mapping only where each field by itself is sound.
    """

    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield problem(where, value, "allowed: a mapping of fields to values")
            return
        problems = [f"{where}.{name} is missing" for name in required if value.get(name) is None]
        problems += [
            f"{where} has no field {name!r}; {nearest(str(name), fields)}"
            for name in value
            if name not in fields
        ]
        for name, field in fields.items():
            if value.get(name) is not None:
                problems += field(value[name], f"{where}.{name}")
        yield from problems
        if not problems:
            for rule in rules:
                yield from rule(value, where)

    return check
