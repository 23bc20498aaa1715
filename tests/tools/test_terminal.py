"""What commands draw, on terminals of several kinds."""

import re

import pytest
from command_case import end_of, on_terminal

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


def test_progress_is_drawn_and_gone_at_the_end(cache):
    text = end_of(process := on_terminal("verify", cache))
    assert process.exitstatus == 0
    assert "verifying" in text
    assert COLOUR.search(text)
    assert text.rpartition("\x1b[2K")[2].startswith("checked     10 blocks")


def test_no_color_is_honoured(cache):
    text = end_of(on_terminal("verify", cache, NO_COLOR="1"))
    assert "verifying" in text
    assert not COLOUR.search(text)


def test_a_dumb_terminal_gets_plain_lines(cache):
    text = end_of(on_terminal("verify", cache, TERM="dumb"))
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.startswith("checked     10 blocks")


@pytest.mark.parametrize("command", [["verify"], ["compact"]], ids=lambda each: each[0])
def test_progress_fits_a_narrow_terminal(cache, command):
    text = end_of(on_terminal(*command, cache, columns=40))
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.rpartition("\x1b[2K")[0])
    assert drawn
    assert all(len(line) <= 40 for line in re.split(r"[\r\n]+", drawn))


def test_nothing_is_drawn_in_a_pipe(kvstore, cache):
    result = kvstore("verify", cache)
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
