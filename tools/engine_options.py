"""Options of every command that runs a model: all of ``LLM``'s settings, and where the cache is."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import click

from engine.config import EngineConfig
from engine.preflight import check
from kvstore.config import StoreConfig, cache_home
from kvstore.errors import ConfigError
from tools.parameters import Directory
from tools.settings import given_values, options_for
from tools.terminal import pass_on_warnings


def engine_settings(parameters: dict[str, Any]) -> dict[str, Any]:
    """Keywords for ``LLM``, checked before anything slow begins. May fetch a model."""
    given = given_values(parameters, EngineConfig)
    _check_store_settings(given.get("store_config", {}))
    settings: dict[str, Any] = {"model": "demo"} | given
    if "disk_cache" not in given:
        settings["disk_cache"] = cache_home() / "cache"
    pass_on_warnings()
    check(EngineConfig.of(**settings))
    return settings


def _check_store_settings(given: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` that lists what ``--store-config`` takes and no option of its own."""
    known = {field.name for field in fields(StoreConfig)}
    unknown = sorted(set(given) - known)
    if unknown:
        listed = sorted(known - {field.name for field in fields(EngineConfig)})
        raise ConfigError(
            f"--store-config: there is no setting {', '.join(unknown)}; there are "
            f"{', '.join(listed)}"
        )


def cache_dir_option() -> click.Option:
    return click.Option(
        ["--cache-dir", "--disk-cache", "disk_cache"],
        metavar="DIR",
        type=Directory(),
        help="Where blocks are kept.  [default: cache/ in the user's kvstore directory]",
    )


def engine_options(*, skip: Collection[str] = ()) -> list[click.Option]:
    """For the section "Engine" of a command's help; without the settings in ``skip``."""
    return options_for(EngineConfig, skip={"disk_cache", *skip})
