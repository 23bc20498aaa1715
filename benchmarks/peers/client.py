"""Other systems as child processes: loaded once, then asked in turn with us.

Each lives in an environment of its own: ``NAME`` in ``.peers/`` of the checkout (``make peers``) or
in the directory that ``KVSTORE_PEERS`` names. transformers and our own engine run in this one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import say

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
# Worker script and environment; None for this one.
SYSTEMS = {
    "ours": ("engine_worker.py", None),
    "transformers": ("transformers_worker.py", None),
    "vllm": ("vllm_worker.py", "vllm"),
    "llama-cpp": ("llama_cpp_worker.py", "llama-cpp"),
}
_SETTLE_S = 0.3  # OpenMP threads of the one asked before may spin for 0.2 s


class PeerError(Exception):
    """A worker failed, or ended; says what it wrote last."""


def installed() -> list[str]:
    """Names of the systems that can be asked here."""
    return [name for name in SYSTEMS if _python(name) is not None]


class Peer:
    """One system. ``settings`` become ``--name value`` options of its worker.

    Use it as a context manager. ``load_s`` is what it took to be ready.
    """

    def __init__(self, name: str, **settings: object) -> None:
        self.name = name
        python = _python(name)
        if python is None:
            raise PeerError(f"{name} is not installed: make peers")
        options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        # A file, not a pipe: nobody empties it, and it tells what went wrong.
        self._talk = tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log")  # noqa: SIM115
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, str(_HERE / SYSTEMS[name][0]), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._talk,
            text=True,
            env=_environment(name),
        )
        try:
            self._answer()
        except PeerError:
            self.close()
            raise
        self.load_s = time.perf_counter() - started

    def generate(self, prompts: Iterable[list[int]], max_tokens: int) -> dict[str, Any]:
        time.sleep(_SETTLE_S)
        return self.ask("generate", prompts=list(prompts), max_tokens=max_tokens)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Raises ``PeerError`` when it cannot."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"op": op, **arguments}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def close(self) -> None:
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._talk.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def _ended(self) -> PeerError:
        status = self._process.wait()
        last = "\n".join(Path(self._talk.name).read_text().splitlines()[-15:])
        return PeerError(f"{self.name} ended with status {status}:\n{last}")


def start(wanted: Mapping[str, Mapping[str, object]]) -> dict[str, Peer]:
    """Those of the wanted systems that are installed and start, with their settings, all at once:
    most of a start is importing. The others are left out with a word on stderr.

    The caller closes them.
    """
    here = [name for name in wanted if name in installed()]
    for name in wanted:
        if name not in here:
            say(f"{name} is not installed (make peers): left out")
    peers = {}
    with ThreadPoolExecutor(max(1, len(here))) as threads:
        starting = {name: threads.submit(Peer, name, **wanted[name]) for name in here}
        for name, peer in starting.items():
            try:
                peers[name] = peer.result()
            except PeerError as error:
                say(f"{name} left out: {error}")
    return peers


def _python(name: str) -> str | None:
    environment = SYSTEMS[name][1]
    if environment is None:
        return sys.executable
    home = Path(os.environ.get("KVSTORE_PEERS", _ROOT / ".peers"))
    python = home / environment / "bin" / "python"
    return str(python) if python.exists() else None


def _environment(name: str) -> dict[str, str]:
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name != "vllm":
        return variables | {"PYTHONPATH": str(_ROOT)}
    cpus = sorted(os.sched_getaffinity(0))
    variables |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB, what our device cache has
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # It is a third as fast without these two.
    home = Path(_python(name) or "").parents[1]
    places = [*home.glob("lib/libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    if places:
        variables["LD_PRELOAD"] = ":".join(map(str, places))
    return variables
