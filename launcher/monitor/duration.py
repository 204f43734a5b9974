"""A length of time as a person reads it."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Return a length of time in the two units that matter: 4.2 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
