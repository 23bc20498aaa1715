"""What ``--json`` prints: JSON that every reader takes."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Texts stay readable where stdout can carry them; a number that JSON lacks is null."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    try:
        return json.dumps(value, indent=indent, ensure_ascii=not is_unicode, allow_nan=False)
    except ValueError:  # infinite, or no number
        return json_text(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
