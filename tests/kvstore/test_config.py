from dataclasses import fields
from pathlib import Path

import pytest

from kvstore.config import DiskConfig, StoreConfig, cache_home, parse_size
from kvstore.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("50GiB", 50 << 30),
        ("1.5 GB", 1_500_000_000),
        ("64kb", 64_000),
        ("7", 7),
        ("0", 0),
        (123, 123),
    ],
)
def test_sizes_are_bytes_or_numbers_with_a_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", -1, "12 parsecs", "1e9", True, None, 1.5, "nan"])
def test_a_nonsensical_size_is_refused_with_its_name(text):
    with pytest.raises(ConfigError, match="host_cache: expected bytes"):
        parse_size(text, "host_cache")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("write_policy", "sometimes"),
        ("load_policy", "maybe"),
        ("durability", "forever"),
        ("disk_mode", "rx"),
        ("dirty_max_age_s", -1),
        ("dirty_max_age_s", float("nan")),
        ("high_watermark", 0.5),
        ("low_watermark", 0),
        ("disk_high_watermark", 1.5),
        ("min_hits", 0),
        ("group_commit_bytes", 0),
        ("write_bytes_per_s", 0),
        ("promote_deadline_s", -0.1),
        ("free_space_floor", "lots"),
        ("namespace_quota", "much"),
    ],
)
def test_a_wrong_setting_is_named_in_the_error(setting, value):
    with pytest.raises(ConfigError, match=setting):
        StoreConfig.of({setting: value})


def test_unknown_settings_are_refused_with_the_nearest_name_or_all():
    with pytest.raises(ConfigError, match=r"unknown dirty_age; did you mean dirty_max_age_s\?$"):
        StoreConfig.of({"dirty_age": 1})
    with pytest.raises(ConfigError, match=r"unknown colour; known are .*dirty_max_age_s"):
        StoreConfig.of({"colour": 1})


def test_a_store_config_serves_where_a_disk_config_is_wanted():
    assert {field.name for field in fields(DiskConfig)} <= {
        field.name for field in fields(StoreConfig)
    }
    assert isinstance(StoreConfig(), DiskConfig)


def test_the_cache_home_is_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("KVSTORE_HOME", raising=False)
    assert cache_home() == Path("/home/me/.cache/kvstore")
    monkeypatch.setenv("KVSTORE_HOME", "~/my models")
    assert cache_home() == Path("/home/me/my models")


def test_without_a_home_directory_the_error_says_what_to_set(monkeypatch):
    monkeypatch.setenv("KVSTORE_HOME", "~nobody-of-this-name/cache")
    with pytest.raises(ConfigError, match="set KVSTORE_HOME"):
        cache_home()
