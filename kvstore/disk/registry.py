"""One environment per directory and process, for as long as somebody uses it.

LMDB must not be opened twice in a process: the locks by which it knows its readers belong to the
process, and the first to close would drop them for all.
"""

import os
import threading
from pathlib import Path

from kvstore.disk.environment import Environment
from kvstore.errors import ConfigError, TierBrokenError

_registry: dict[tuple[int, int], Environment] = {}
_registry_lock = threading.Lock()
_inherited: dict[tuple[int, int], Environment] = {}  # by a forked child, from its parent


def acquire(
    directory: Path,
    *,
    role: str,
    durability: str = "process",
    is_read_only: bool = False,
    raise_on_damage: bool = False,
    capacity_bytes: int | None = None,
) -> Environment:
    """The environment of an existing directory, one per process; pair with ``release``."""
    with _registry_lock:
        stat = directory.stat()
        key = (stat.st_dev, stat.st_ino)
        env = _registry.get(key)
        if env is not None and not is_read_only:
            if env.is_read_only:
                raise ConfigError(f"{directory} is open read-only in this process; close it first")
            if env.durability != durability:
                raise ConfigError(
                    f"durability: {directory} is open in this process with {env.durability!r}"
                )
        if env is None:
            if key in _inherited:
                raise TierBrokenError(
                    f"{directory} was open when this process was forked, and LMDB does not survive "
                    "a fork; start the process by spawn, or open the cache after forking only",
                    tier="disk",
                )
            env = Environment(
                directory,
                role=role,
                durability=durability,
                is_read_only=is_read_only,
                raise_on_damage=raise_on_damage,
                capacity_bytes=capacity_bytes,
            )
            _registry[key] = env
        env.num_users += 1
        return env


def release(env: Environment) -> None:
    with _registry_lock:
        env.num_users -= 1
        if env.num_users > 0:
            return
        for key in [key for key, value in _registry.items() if value is env]:
            del _registry[key]
        env.close()


def _after_fork_in_child() -> None:
    """A child must not use the parent's environments: liblmdb does not survive a fork.

    They stay referenced: closing one would give the parent's reader slots to others.
    """
    global _registry_lock
    _registry_lock = threading.Lock()
    for env in _registry.values():
        env.abandon()
    _inherited.update(_registry)
    _registry.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
