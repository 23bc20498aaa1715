"""Sizes for people."""


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
