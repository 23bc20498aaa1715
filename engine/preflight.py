"""What is wrong with a configuration, found before torch is imported and a model loaded."""

from pathlib import Path

from engine.config import EngineConfig
from engine.model.source import resolve_model
from kvstore.disk.places import check_place


def check_cache_place(config: EngineConfig) -> None:
    """Raises ``ConfigError`` where the directory of the disk tier cannot be one. Makes nothing."""
    if config.disk_cache is not None and config.enable_prefix_caching:
        is_read_only = config.resolved_store_config().disk_mode == "ro"
        check_place(Path(config.disk_cache), is_read_only=is_read_only)


def check(config: EngineConfig) -> None:
    """Raises ``ConfigError`` for a model that is not there, too. May fetch one."""
    check_cache_place(config)
    resolve_model(config.model, revision=config.revision)
