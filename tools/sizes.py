"""Sizes and times for people."""


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
