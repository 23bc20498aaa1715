"""Every keyword of ``LLM`` and ``SamplingParams`` is an option of ``kvstore ask``."""

from dataclasses import dataclass, fields

import click
import pytest

from engine.config import EngineConfig
from engine.sampling.sampling_params import SamplingParams
from kvstore.errors import ConfigError
from tools.ask_command import ask
from tools.settings import given_values, options_for, parse_assignments

FLAGS = {flag for param in ask.params for flag in param.opts}


@dataclass
class Config:
    """A few settings.

    size      bytes, or a text such
              as "1MiB"
    is_quick  whether ``x`` is quick

    ignored  is no field
    """

    size: int | str = "auto"
    is_quick: bool = False
    ratio: float = 0.5
    limit: int | None = None


def parse(*arguments: str) -> dict:
    command = click.Command("x", params=options_for(Config))
    return given_values(command.make_context("x", list(arguments)).params, Config)


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_ask_has_an_option_for_every_field(config):
    for field in fields(config):
        assert f"--{field.name.replace('_', '-')}" in FLAGS


def test_options_that_were_not_given_leave_the_defaults_to_the_dataclass():
    assert parse() == {}
    assert parse("--limit", "3") == {"limit": 3}


def test_values_have_the_types_of_their_fields():
    given = parse("--size", "12", "--is-quick", "--ratio", "1", "--limit", "3")
    assert given == {"size": "12", "is_quick": True, "ratio": 1.0, "limit": 3}
    assert isinstance(given["ratio"], float)
    assert parse("--no-is-quick") == {"is_quick": False}


def test_help_is_the_docstring_of_the_dataclass_and_its_defaults():
    size, is_quick, ratio, limit = options_for(Config, defaults={"ratio": 2.5})
    assert size.help == 'bytes, or a text such as "1MiB"  [default: auto]'
    assert is_quick.help == "whether x is quick  [default: off]"
    assert ratio.help == "[default: 2.5]"
    assert limit.help == ""


def test_skipped_fields_have_no_option():
    assert [o.name for o in options_for(Config, skip={"size", "limit"})] == ["is_quick", "ratio"]


def test_assignments_are_json_or_text():
    assert parse_assignments(["a=1", "b=0.5", "c=x=y", "d=null", "e=true"], "--o") == {
        "a": 1,
        "b": 0.5,
        "c": "x=y",
        "d": None,
        "e": True,
    }


@pytest.mark.parametrize("text", ["a", "=1", ""])
def test_an_assignment_without_a_name_or_value_is_refused(text):
    with pytest.raises(ConfigError, match="--o: expected NAME=VALUE"):
        parse_assignments([text], "--o")
