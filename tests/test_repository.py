"""Claims about the repository as a whole: layers, imports, and what the README says."""

import ast
import functools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from engine.model.source import demo_model
from tools.commands import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = {"benchmarks", "engine", "kernels", "kvstore", "tools"}
MAY_IMPORT = {
    "kvstore": {"kvstore"},
    "kernels": {"kernels"},
    "engine": {"engine", "kernels", "kvstore"},
    "tools": {"engine", "kvstore", "tools"},
}
THIRD_PARTY = {
    "kvstore": {
        "asyncio_throttle", "lmdb", "msgpack", "numpy", "platformdirs", "prometheus_client",
        "torch", "xxhash", "zstandard",
    },
    "kernels": {"numpy", "torch", "triton"},
}  # fmt: skip


@functools.cache
def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_layer_imports_only_what_lies_below_it(folder):
    for path in modules(folder):
        assert imported(path) & OURS <= MAY_IMPORT[folder], path


@pytest.mark.parametrize("folder", THIRD_PARTY)
def test_a_lower_layer_needs_few_packages(folder):
    for path in modules(folder):
        outside = imported(path) - set(sys.stdlib_module_names) - OURS
        assert outside <= THIRD_PARTY[folder], path


def test_only_the_memory_tiers_of_the_store_know_torch():
    for path in modules("kvstore"):
        if "torch" in imported(path):
            assert path.parent == ROOT / "kvstore" / "tiers", path


def test_only_the_engine_knows_transformers():
    for folder in OURS - {"engine", "benchmarks"}:
        for path in modules(folder):
            assert "transformers" not in imported(path), path


def test_only_the_server_needs_its_extra():
    for folder in OURS:
        for path in modules(folder):
            if imported(path) & {"fastapi", "pydantic", "starlette", "uvicorn"}:
                assert path.parent == ROOT / "engine" / "server", path


@pytest.mark.parametrize(
    "package", ["kvstore", "kvstore.disk", "kvstore.disk.offline", "kvstore.planning"]
)
def test_the_store_imports_without_torch_and_what_lies_above_it(package):
    banned = ["torch", "triton", "transformers", "engine", "kernels"]
    code = f"import sys; sys.modules |= dict.fromkeys({banned!r}); import {package}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("folder", ["kernels", "tools"])
def test_namespace_packages_stay_namespace_packages(folder):
    """A regular ``kernels`` of ours would overwrite the Hugging Face package of that name."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    "name", ["layer", "utils", "cli", "benchmark", "lockfile", "versions", "_versions"]
)
def test_no_kernel_module_has_a_name_that_the_other_kernels_package_uses(name):
    assert not (ROOT / "kernels" / f"{name}.py").exists()


def test_the_readme_shows_every_command_and_no_other():
    shown = set(re.findall(r"^kvstore (\w+)", README, re.MULTILINE))
    assert shown == set(cli.summaries)


def test_the_readme_and_the_makefile_agree():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    shown = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test", "lint"} <= shown <= targets


@pytest.mark.parametrize("page", ["README.md", "docs/*.md", "examples/*.md"])
def test_links_between_pages_lead_somewhere(page):
    for path in ROOT.glob(page):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_settings_in_the_readme_have_their_real_defaults():
    from engine.config import EngineConfig

    defaults = {f.name: f.default for f in EngineConfig.__dataclass_fields__.values()}
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", README, re.MULTILINE)
    assert len(rows) >= 8
    for name, shown in rows:
        assert ast.literal_eval(shown) == defaults[name], name


def test_the_example_in_the_readme_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    demo_model()  # so that fetching it says nothing below
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Marta Lindqvist is 41 years old. {'device': 17")
    assert second.startswith("Aiko Tanabe is from Japan. {'device': 17")
    assert (tmp_path / "kv-cache" / "data.mdb").exists()


def test_the_prefix_caching_example_finds_its_table_the_second_time(capsys):
    demo_model()
    runpy.run_path(str(ROOT / "examples" / "prefix_caching.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "Marta Lindqvist is 41" in output
    assert "Pavel Horak is 29" in output
    cached = [int(n) for n in re.findall(r"(\d+) prompt tokens cached", output)]
    assert cached[0] == 0
    assert cached[1] > 1700
