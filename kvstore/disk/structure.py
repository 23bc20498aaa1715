"""Whether a data file may be handed to liblmdb, and what happens to one that may not.

liblmdb trusts its file: a truncated one kills the process with SIGBUS, a flipped bit in a tree
page may kill it with SIGSEGV. So two checks run without it: a light one, which reads the two meta
pages at every open, and a deep one, which walks every tree (O(n), about 0.3 s per GB) in a child
process when there is a reason to doubt the file. A file that fails is renamed, never deleted.
"""

import json
import logging
import os
import stat
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from kvstore.errors import TierBrokenError

logger = logging.getLogger(__name__)

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
ASIDE_MARK = ".damaged-"

_MAGIC = 0xBEEFC0DE
_VERSION = 1  # data format of LMDB 0.9
_P_LEAF = 0x02
_P_META = 0x08
_PAGE_HEADER = 16
_NO_PAGE = 2**64 - 1
_LOOKS = 3
# A meta page of LMDB 0.9, 64 bit: header (pgno, pad, flags, lower, upper), then magic, version,
# address, map size, two tree descriptors (pad, flags, depth, branch, leaf, overflow, entries,
# root), last page, transaction id. The page size is the first descriptor's pad.
_META = struct.Struct("=Q4H II QQ IHHQQQQQ IHHQQQQQ QQ")


class Soundness(Enum):
    EMPTY = auto()  # nothing there yet: a new cache, or one whose creation was interrupted
    SOUND = auto()
    DOUBTFUL = auto()  # shorter than its last page: only the deep check can tell
    DAMAGED = auto()
    FOREIGN = auto()  # not an LMDB file of the format we write


@dataclass(frozen=True, slots=True)
class Finding:
    soundness: Soundness
    reason: str = ""
    page_size: int = 0
    num_pages: int = 0
    main_root: int | None = None  # page of the tree that names the databases; None: no database yet


def check_light(data_file: Path) -> Finding:
    """Judge the file by its two meta pages and its size; reads 8 KiB, maps nothing.

    A writer may be at work on it: what looks wrong is looked at again.
    """
    for _ in range(_LOOKS - 1):
        finding = _look(data_file)
        if finding.soundness in (Soundness.EMPTY, Soundness.SOUND):
            return finding
        time.sleep(0.001)
    return _look(data_file)


def _look(data_file: Path) -> Finding:
    try:
        fd = os.open(data_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
    except FileNotFoundError:
        return Finding(Soundness.EMPTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return Finding(Soundness.FOREIGN, "no regular file")
        if os.fstat(fd).st_size == 0:
            return Finding(Soundness.EMPTY)
        metas = [_parse_meta(os.pread(fd, _META.size, 0))]
        if isinstance(metas[0], str):
            return Finding(Soundness.DAMAGED, f"meta page 0: {metas[0]}")
        metas.append(_parse_meta(os.pread(fd, _META.size, metas[0].page_size)))
        size = os.fstat(fd).st_size  # after the meta pages: a commit extends the file before them
    finally:
        os.close(fd)
    return _judge(metas, size)


@dataclass(frozen=True, slots=True)
class _Meta:
    page: int
    page_size: int
    version: int
    roots: tuple[int, int]
    last_page: int
    txnid: int


def _parse_meta(raw: bytes) -> _Meta | str:
    """The meta page, or what is wrong with it."""
    if len(raw) < _META.size:
        return "beyond the end of the file"
    fields = _META.unpack(raw)
    page, flags, magic, version = fields[0], fields[2], fields[5], fields[6]
    page_size, free_root, main_root = fields[9], fields[16], fields[24]
    if magic != _MAGIC:
        return "no LMDB signature"
    if not flags & _P_META:
        return "not marked as a meta page"
    if page_size < 256 or page_size > 0x8000 or page_size & (page_size - 1):
        return f"impossible page size {page_size}"
    return _Meta(page, page_size, version, (free_root, main_root), fields[25], fields[26])


def _judge(metas: "list[_Meta | str]", size: int) -> Finding:
    for index, meta in enumerate(metas):
        where = f"meta page {index}"
        if isinstance(meta, str):
            return Finding(Soundness.DAMAGED, f"{where}: {meta}")
        if meta.version != _VERSION:
            return Finding(Soundness.FOREIGN, f"{where}: LMDB data format {meta.version}")
        if meta.page != index or (meta.txnid and meta.txnid % 2 != index):
            return Finding(Soundness.DAMAGED, f"{where}: stands in the wrong place")
        if any(root != _NO_PAGE and not 2 <= root <= meta.last_page for root in meta.roots):
            return Finding(Soundness.DAMAGED, f"{where}: a tree's root lies outside the file")
    first, second = metas
    assert isinstance(first, _Meta)
    assert isinstance(second, _Meta)
    if first.page_size != second.page_size:
        return Finding(Soundness.DAMAGED, "the meta pages disagree on the page size")
    num_pages = max(first.last_page, second.last_page) + 1
    root = (first if first.txnid > second.txnid else second).roots[1]
    found: dict[str, Any] = {"page_size": first.page_size, "num_pages": num_pages}
    found["main_root"] = None if root == _NO_PAGE else root
    if num_pages * first.page_size > size:
        # LMDB need not write a page that was freed in the transaction that took it, so a file may
        # lack free pages at its end; far more often it was cut.
        reason = f"{size} bytes, {num_pages * first.page_size} expected"
        return Finding(Soundness.DOUBTFUL, reason, **found)
    return Finding(Soundness.SOUND, **found)


def database_names(data_file: Path, finding: Finding) -> list[bytes] | None:
    """The keys of the main tree, where it is one leaf page (six databases are); else None."""
    if finding.main_root is None:
        return []
    with data_file.open("rb") as file:
        file.seek(finding.main_root * finding.page_size)
        page = file.read(finding.page_size)
    if len(page) < finding.page_size or struct.unpack_from("=H", page, 10)[0] != _P_LEAF:
        return None
    names = []
    try:
        (lower,) = struct.unpack_from("=H", page, 12)
        for slot in range(_PAGE_HEADER, lower, 2):
            (node,) = struct.unpack_from("=H", page, slot)
            (length,) = struct.unpack_from("=H", page, node + 6)
            names.append(page[node + 8 : node + 8 + length])
    except struct.error:
        return None
    return names


# Only the standard library and lmdb: the child need not be able to import this package.
_DEEP_CHECK = """
import json, os, sys
from lmdb.verify import verify
os.nice(10)
try:
    problems = verify(sys.argv[1], subdir=False)
except MemoryError:
    sys.exit("not enough memory")
except Exception as error:  # whatever a walk over damaged pages may end in
    problems = [str(error) or type(error).__name__]
json.dump(problems[:20], sys.stdout)
"""


def check_deep(data_file: Path) -> list[str]:
    """Walk every tree of the file in a child process; the problems found, none when it is sound.

    Nobody may write the file meanwhile. Blocks for about 0.3 s per GB. Raises ``TierBrokenError``
    when the child could not judge the file, which says nothing about it.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _DEEP_CHECK, str(data_file)]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit {child.returncode}"]
        raise TierBrokenError(f"{data_file} could not be checked: {lines[-1]}", tier="disk")
    problems: list[str] = json.loads(child.stdout)
    return problems


def pad_to_last_page(data_file: Path, finding: Finding) -> None:
    """Give a file that passed the deep check its missing free pages, so that it is sound again."""
    os.truncate(data_file, max(finding.num_pages * finding.page_size, data_file.stat().st_size))


def set_aside(data_file: Path, reason: str) -> Path:
    """Rename a damaged file, so that a fresh one can begin. The caller holds it alone."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    target = data_file.with_name(f"{data_file.name}{ASIDE_MARK}{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = data_file.with_name(f"{data_file.name}{ASIDE_MARK}{stamp}-{number}")
    data_file.rename(target)
    logger.warning("set aside a damaged cache file=%s reason=%s", target, reason)
    return target
