"""JSON that every reader takes, whatever is printed and wherever to."""

import io
import json
import sys

import pytest

from tools.json_text import json_text

VALUE = {"é": ["日本", "\x1b", 1.5, 2**63, None, True], "n": {"inf": float("inf"), "x": [-1e400]}}


@pytest.mark.parametrize(("encoding", "is_ascii"), [("utf-8", False), ("latin-1", True)])
def test_it_is_readable_where_stdout_can_carry_it_and_ascii_elsewhere(
    monkeypatch, encoding, is_ascii
):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    text = json_text(VALUE)
    assert text.isascii() is is_ascii
    assert json.loads(text)["é"] == VALUE["é"]


def test_a_number_that_json_lacks_is_null():
    assert json.loads(json_text(VALUE))["n"] == {"inf": None, "x": [None]}
    assert "\n" not in json_text(VALUE, indent=None)
