"""Completion: in bash as a user types, in other shells by the protocol of their scripts."""

import os
import shutil

import pexpect
import pytest
from command_case import KVSTORE


@pytest.fixture
def bash(tmp_path, cache):
    (tmp_path / "notes.txt").touch()
    shell = pexpect.spawn(
        shutil.which("bash") or "bash",
        ["--norc", "--noprofile", "-i"],
        encoding="utf-8",
        timeout=60,
        dimensions=(24, 200),
        cwd=str(tmp_path),
        env=os.environ
        | {"PATH": f"{KVSTORE.parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "READY> "},
    )
    shell.sendline("bind 'set enable-bracketed-paste off'; bind 'set bell-style none'")
    shell.sendline('eval "$(_KVSTORE_COMPLETE=bash_source kvstore)" && echo is" "set')
    shell.expect_exact("is set\r\n")
    yield shell
    shell.close(force=True)


def test_bash_completes_commands_options_values_directories_and_files(bash):
    for typed, completed in [
        ("kvstore comp\t", "kvstore compact "),
        ("a\t", r"a\ cache/"),
        (" --js\t", "--json "),
        ("\x15kvstore ask no\t", "kvstore ask notes.txt "),
        ("--load-policy al\t", "--load-policy always "),
        ("\x15kvstore evict 'a cache' --namespace t\t", "--namespace test/tiny"),
    ]:
        bash.send(typed)
        bash.expect_exact(completed)


def complete(run, shell: str, words: str, position: int, incomplete: str = "") -> str:
    environment = {
        "_KVSTORE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words if shell == "zsh" else f"{words} {incomplete}",
        "COMP_CWORD": str(position) if shell == "zsh" else incomplete,
    }
    result = run(**environment)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_the_same(run, cache, shell):
    assert "_KVSTORE_COMPLETE" in run(_KVSTORE_COMPLETE=f"{shell}_source").stdout
    assert "verify" in complete(run, shell, "kvstore", 1)
    assert "dir" in complete(run, shell, "kvstore verify", 2)
    assert "file" in complete(run, shell, "kvstore import d", 3)
    assert "always" in complete(run, shell, "kvstore ask f --load-policy", 4)
    found = complete(run, shell, f"kvstore evict '{cache}' --namespace", 4)
    assert "test/tiny" in found
    assert "10 blocks" in found
