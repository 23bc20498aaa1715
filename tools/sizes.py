"""Counts, sizes and times for people."""

import time


def format_count(count: int, noun: str) -> str:
    """``"1 block"``, ``"1,024 blocks"``; the noun is given in the singular."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(size: int | None) -> str:
    """``"1.5 GiB"``; the unit is the largest that leaves at least 1 before the point."""
    if size is None:
        return "unknown"
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_age(seconds: float) -> str:
    """``"3 days"``; in the largest unit of which there are at least two."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return "a minute" if seconds >= 60 else "less than a minute"


def format_age_until(moment: float | None) -> str:
    """How long a pin still holds."""
    if moment is None:
        return "until it is released"
    return f"for {format_age(max(moment - time.time(), 0.0))} more"
