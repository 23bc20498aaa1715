"""Blocks to store, and an oracle that reads the medium with bare lmdb, not through the store."""

import faulthandler
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import xxhash

from kvstore.block import BlockRef, BlockWrite
from kvstore.config import DiskConfig
from kvstore.disk import DiskStore
from kvstore.hashing import chain_refs, chain_seed, encode_tokens, namespace_id

BLOCK = 16
IDENTITY = {
    "model": "test/tiny",
    "dtype": "bfloat16",
    "block_size": BLOCK,
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
}
NAMESPACE = namespace_id(IDENTITY)
FIELDS = ("parent", "tokens", "depth", "namespace", "salt", "num_tokens", "nbytes")
FIELDS += ("payload_bytes", "codec", "checksum", "created", "touched", "order", "is_bad")
LATER_FIELDS = {"hits": 0, "num_pins": 0, "pinned_until": 0.0}  # the last ones are left out


class Blocks:
    """Documents of random tokens, and payloads that follow from the key, so that any process knows
    what a block must hold."""

    def __init__(self, payload_bytes: int = 20_000, namespace: bytes = NAMESPACE) -> None:
        self.payload_bytes = payload_bytes
        self.namespace = namespace
        self._random = random.Random(7)

    def chain(self, num_blocks: int, start: int | None = None, salt: str = "") -> list[BlockRef]:
        first = self._random.randrange(1 << 30) if start is None else start
        tokens = encode_tokens([(first + i * 7919) % (1 << 31) for i in range(num_blocks * BLOCK)])
        return chain_refs(chain_seed(self.namespace, salt), tokens, 4 * BLOCK)

    def below(self, ref: BlockRef, num_blocks: int, start: int) -> list[BlockRef]:
        tokens = encode_tokens([(start + i * 31) % (1 << 31) for i in range(num_blocks * BLOCK)])
        return chain_refs(ref.key, tokens, 4 * BLOCK, ref.depth + 1)

    def payload(self, ref: BlockRef) -> bytes:
        return random.Random(ref.key).randbytes(self.payload_bytes)

    def writes(self, refs: list[BlockRef], salt: bytes = b"") -> list[BlockWrite]:
        return [BlockWrite(ref, self.namespace, salt, self.payload(ref)) for ref in refs]

    def read(self, store: DiskStore, ref: BlockRef) -> bytes:
        data = bytearray(self.payload_bytes)
        store.read_into(ref, memoryview(data))
        return bytes(data)


class FakeClock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Child:
    """A process that runs ``code`` beside the test, with everything of this module at hand.

    They talk in lines: ``hear`` waits for one that the child prints, ``say`` gives it one to read.
    """

    def __init__(self, code: str, *arguments: Any, command: Sequence[str] = ()) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        start = "import sys\nfrom disk_case import *\nsay = lambda *a: print(*a, flush=True)\n"
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", start + textwrap.dedent(code), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            assert self.process.stderr is not None
            raise AssertionError(f"child ended: {self.process.stderr.read()}")
        return line.strip()

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        if how is signal.SIGKILL:
            self.process.wait()

    def end(self) -> int:
        """Let it run to its end; what it exits with."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def fork(what: Callable[[], int]) -> int:
    """The pid of a child that does ``what`` and exits with its result, 99 after an exception.

    It prints no crash report and leaves no core file.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads are asleep
        child = os.fork()
    if child == 0:
        code = 99
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = what()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def in_fork(what: Callable[[], int]) -> int:
    """What a forked child ends with: its result, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(what), 0)[1])


def small(**settings: Any) -> DiskConfig:
    """Settings that keep no free space, so that tests do not depend on the volume."""
    return DiskConfig(free_space_floor=0, **settings)


def raw_records(directory: Path) -> dict[bytes, dict[str, Any]]:
    return _read_raw(directory)["index"]


def problems_on_disk(directory: Path) -> list[str]:
    """Every way in which the cache at rest is not what it should be, found with bare lmdb."""
    raw = _read_raw(directory)
    index, payload = raw["index"], raw["payload"]
    found = []
    inner = {record["parent"] for record in index.values()}
    sums: dict[bytes, list[int]] = {}
    for key, record in index.items():
        name = key.hex()[:8]
        if record["depth"] and record["parent"] not in index:
            found.append(f"{name}: no parent")
        elif record["depth"] and index[record["parent"]]["depth"] != record["depth"] - 1:
            found.append(f"{name}: depth")
        if key not in raw["children"].get(record["parent"], set()):
            found.append(f"{name}: not among its parent's children")
        may_go = key not in inner and not record["num_pins"]
        if may_go != (raw["recency"].get(record["order"]) == key):
            found.append(f"{name}: recency")
        if record["num_pins"] != raw["num_pins"].get(key, 0):
            found.append(f"{name}: pins")
        if record["is_bad"]:
            if key in payload:
                found.append(f"{name}: bad, with payload")
            if may_go:
                found.append(f"{name}: bad leaf")
        elif key not in payload:
            found.append(f"{name}: no payload")
        elif xxhash.xxh3_128_digest(payload[key]) != record["checksum"]:
            found.append(f"{name}: checksum")
        total = sums.setdefault(record["namespace"] + record["salt"], [0] * 6)
        total[2] += record["length"]
        total[4] += record["num_pins"] > 0
        total[5] += -(-(record["nbytes"] + 16) // 4096) if record["num_pins"] else 0
        if record["is_bad"]:
            total[3] += 1
        else:
            total[0] += 1
            total[1] += record["num_tokens"]
            total[2] += record["nbytes"]
    if sum(map(len, raw["children"].values())) != len(index):
        found.append("children of nobody")
    if len(raw["recency"]) != len(set(index) - inner - set(raw["num_pins"])):
        found.append("recency of nobody")
    if set(payload) - set(index):
        found.append("payload of nobody")
    if raw["usage"] != sums:
        found.append(f"usage {raw['usage']} is not {sums}")
    head = [sum(column) for column in zip(*sums.values(), strict=True)] if sums else [0] * 6
    if raw["head"] != head:
        found.append(f"head {raw['head']} is not {head}")
    return found


def _read_raw(directory: Path) -> dict[str, Any]:
    env = lmdb.open(str(directory), readonly=True, max_dbs=6, create=False)
    try:
        with env.begin() as txn:
            tables = {
                name: list(txn.cursor(db=env.open_db(name.encode(), txn, create=False)))
                for name in ("index", "payload", "recency", "meta")
            }
            children: dict[bytes, set[bytes]] = {}
            child_db = env.open_db(b"children", txn, create=False, dupsort=True)
            for parent, child in txn.cursor(db=child_db):
                children.setdefault(parent, set()).add(child)
    finally:
        env.close()
    index = {}
    for key, value in tables["index"]:
        assert xxhash.xxh3_128_digest(key + value[16:]) == value[:16], key.hex()
        fields = msgpack.unpackb(value[16:])
        row = dict(zip([*FIELDS, *LATER_FIELDS], fields, strict=False))
        index[key] = LATER_FIELDS | row
        index[key]["length"] = len(value)
    usage, head, ends = {}, [], {}
    for key, value in tables["meta"]:
        if key.startswith(b"usage/"):
            usage[key[6:]] = _counters(value[16:])
        elif key == b"head":
            head = _counters(value[48:])
        elif key.startswith(b"pin/"):
            ends[key[12:]] = struct.unpack(">d", key[4:12])[0]
    assert ends == {key: row["pinned_until"] for key, row in index.items() if row["pinned_until"]}
    num_pins: dict[bytes, int] = {}
    for key in ends:
        while key in index:
            num_pins[key] = num_pins.get(key, 0) + 1
            key = index[key]["parent"]
    return {
        "index": index,
        "num_pins": num_pins,
        "payload": dict(tables["payload"]),
        "recency": dict(tables["recency"]),
        "children": children,
        "usage": usage,
        "head": head,
    }


def _counters(raw: bytes) -> list[int]:
    """Six numbers; where nothing is pinned only four of them stand there."""
    numbers = list(struct.unpack(f"<{len(raw) // 8}Q", raw))
    return numbers + [0] * (6 - len(numbers))


def data_file(directory: Path) -> Path:
    return directory / "data.mdb"


def damage_payload(directory: Path, payload: bytes) -> None:
    """Flip one bit in the middle of a block's bytes in the file."""
    file = data_file(directory)
    at = file.read_bytes().index(payload) + len(payload) // 2
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([payload[len(payload) // 2] ^ 0x10]))
