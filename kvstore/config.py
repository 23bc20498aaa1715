"""Settings of the store, validated when they are made. Every default stands here, once."""

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kvstore.errors import ConfigError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(value: int | str, name: str = "size") -> int:
    """Bytes from an int, or from a string such as ``"512MiB"`` or ``"1.5 GB"``.

    KB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB powers of 1024.
    """
    problem = f'{name}: expected bytes or a size like "512MiB" or "50GB", got {value!r}'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(problem)
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(problem)
        return value
    match = _SIZE.fullmatch(value.strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ConfigError(problem)
    num_bytes = float(match[1]) * units[match[2].lower()]
    if not math.isfinite(num_bytes):
        raise ConfigError(problem)
    return math.floor(num_bytes)


def expand_home(path: str | os.PathLike[str]) -> Path:
    """The path, ``~`` resolved. Raises ``ConfigError`` for a home directory that is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{os.fspath(path)}: there is no such home directory; write the path out, or ./~name"
        ) from None


def cache_home() -> Path:
    """Where models and default caches live: ``KVSTORE_HOME``, else the user's cache directory."""
    import platformdirs  # here, for the disk tier alone does without it

    home = os.environ.get("KVSTORE_HOME")
    try:
        return Path(home).expanduser() if home else platformdirs.user_cache_path("kvstore")
    except RuntimeError:
        raise ConfigError(
            "there is no home directory to keep files in; set KVSTORE_HOME to a directory"
        ) from None


_MOST_SECONDS = 1e9  # some 30 years: a timeout of much more overflows the system's clocks

_KINDS = {bool: "True or False", int: "an integer", float: "a number", type(None): "None"}


def check_kinds(config: Any) -> None:
    """Refuse, in a dataclass, what is no number where one is expected, or no switch.

    True is none: Python takes it for 1. Raises ``ConfigError``.
    """
    for field in fields(config):
        kinds, value = get_args(field.type) or (field.type,), getattr(config, field.name)
        if not set(kinds) <= set(_KINDS):
            continue
        accepted = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(_KINDS[kind] for kind in kinds)
            raise ConfigError(f"{field.name}: expected {expected}, got {value!r}")


def check_seconds(name: str, value: Any, *, may_be_zero: bool = False) -> None:
    """Refuse an argument that is neither None nor a number of seconds above 0, or with
    ``may_be_zero`` from 0 on. Raises ``ConfigError``."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < _MOST_SECONDS or (may_be_zero and value == 0)):
        kind = "number of seconds from 0 on" if may_be_zero else "positive number of seconds"
        raise ConfigError(f"{name}: expected a {kind}, got {value!r}")


def _check_choice(config: Any, name: str, choices: tuple[str, ...]) -> None:
    if getattr(config, name) not in choices:
        raise ConfigError(
            f"{name}: expected one of {', '.join(choices)}, got {getattr(config, name)!r}"
        )


def _check_at_least(config: Any, name: str, least: float) -> None:
    value = getattr(config, name)
    if not value >= least:
        raise ConfigError(f"{name}: expected a number of at least {least}, got {value!r}")


def _check_watermarks(config: Any, high: str, low: str) -> None:
    _check_at_least(config, high, 0)
    _check_at_least(config, low, 0)
    if not 0 < getattr(config, low) <= getattr(config, high) <= 1:
        raise ConfigError(
            f"{low}, {high}: expected 0 < {low} <= {high} <= 1, "
            f"got {getattr(config, low)} and {getattr(config, high)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """Settings of the disk tier that do not belong to the directory itself."""

    disk_mode: Literal["rw", "ro"] = "rw"
    durability: Literal["process", "power"] = "process"  # survive kill -9 · also a power cut
    on_corruption: Literal["set_aside", "raise"] = "set_aside"  # a structurally damaged file
    codec: str = "raw"
    group_commit_bytes: int = 16 << 20  # one transaction writes at most this much payload
    disk_high_watermark: float = 0.90  # fill of the map's pages at which eviction starts
    disk_low_watermark: float = 0.80  # and at which it stops
    free_space_floor: int | str = "auto"  # bytes left free on the volume; 5 % or 2 GiB, the smaller
    touch_interval_s: float = 60.0  # a use is recorded again after this long
    namespace_quota: int | str | None = None  # bytes one model may hold of the directory
    salt_quota: int | str | None = None  # bytes one salt may hold of a namespace

    def __post_init__(self) -> None:
        check_kinds(self)
        _check_choice(self, "disk_mode", ("rw", "ro"))
        _check_choice(self, "durability", ("process", "power"))
        _check_choice(self, "on_corruption", ("set_aside", "raise"))
        _check_at_least(self, "group_commit_bytes", 1)
        _check_at_least(self, "touch_interval_s", 0)
        _check_watermarks(self, "disk_high_watermark", "disk_low_watermark")
        if self.free_space_floor != "auto":
            parse_size(self.free_space_floor, "free_space_floor")
        for name in ("namespace_quota", "salt_quota"):
            if getattr(self, name) is not None:
                parse_size(getattr(self, name), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(DiskConfig):
    """Settings of a ``BlockStore`` beyond the sizes of its tiers."""

    policy: Literal["lru", "slru", "s3-fifo"] = "lru"  # who leaves the device first
    write_policy: Literal["write_behind", "write_through", "write_back", "min_hits"] = (
        "write_behind"
    )
    load_policy: Literal["auto", "always", "never"] = "auto"
    dirty_max_age_s: float = 2.0  # a block that disk does not hold is written after this long
    high_watermark: float = 0.90  # fill of a memory tier at which cleaning by fill starts
    low_watermark: float = 0.75  # and at which it stops
    min_hits: int = 2  # write policy min_hits: requests that find a block before it is written
    min_partial_tokens: int = 8  # least saving for which the head of a block is copied
    reuse_unit_blocks: int = 1  # a prefix is reused in multiples of so many blocks
    staging_bytes: int = 64 << 20  # buffer between disk and a device the processor cannot address
    write_bytes_per_s: float = 1 << 30  # most that cleaning writes to disk; infinity for no limit
    # What a request waits for tiers, altogether: None until they have answered, a time after which
    # it computes what has not arrived, 0 for what is there at once (best effort).
    promote_deadline_s: float | None = None
    event_file: str | os.PathLike[str] | None = None  # what happens to blocks is appended here

    def __post_init__(self) -> None:
        DiskConfig.__post_init__(self)
        _check_choice(
            self, "write_policy", ("write_behind", "write_through", "write_back", "min_hits")
        )
        _check_choice(self, "load_policy", ("auto", "always", "never"))
        _check_choice(self, "policy", ("lru", "slru", "s3-fifo"))
        _check_at_least(self, "dirty_max_age_s", 0)
        _check_at_least(self, "min_hits", 1)
        _check_at_least(self, "min_partial_tokens", 1)
        _check_at_least(self, "reuse_unit_blocks", 1)
        _check_at_least(self, "staging_bytes", 1)
        _check_at_least(self, "write_bytes_per_s", 1)
        _check_watermarks(self, "high_watermark", "low_watermark")
        if self.promote_deadline_s is not None:
            _check_at_least(self, "promote_deadline_s", 0)

    @classmethod
    def of(cls, config: "StoreConfig | Mapping[str, Any] | None") -> "StoreConfig":
        """From a config, a mapping of its fields, or nothing. Unknown keys are refused."""
        if isinstance(config, StoreConfig):
            return config
        values = dict(config or {})
        refuse_unknown("store_config", values, sorted(field.name for field in fields(cls)))
        return cls(**values)


def refuse_unknown(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises ``ConfigError`` for names that are not known: with what they are like, where they are
    like one, else with all that there are."""
    for name in sorted(set(given) - set(known)):
        like = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {like[0]}?" if like else f"known are {', '.join(known)}"
        raise ConfigError(f"{what}: unknown {name}; {remedy}")
