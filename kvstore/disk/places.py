"""Whether a path and a size can be meant for a cache; said before anything is created."""

import os
import stat
from pathlib import Path

from kvstore.config import expand_home
from kvstore.disk.attach import ATTACH_FILE
from kvstore.disk.startup import is_ours
from kvstore.disk.structure import ASIDE_MARK, DATA_FILE, LOCK_FILE
from kvstore.errors import ConfigError

MIN_CAPACITY_BYTES = 1 << 20
MAX_CAPACITY_BYTES = 1 << 46  # 64 TiB: the address space a map may take
TEMPORARY_MARK = ".tmp-"

# LMDB shares memory and locks through the file; these do not keep either coherent between machines.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "beegfs", "gpfs"}
_NETWORK |= {"glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "ocfs2"}


def check_capacity(capacity_bytes: int | None) -> None:
    if capacity_bytes is None:
        return
    if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int):
        raise ConfigError(f"disk_cache_size: expected bytes, got {capacity_bytes!r}")
    if not MIN_CAPACITY_BYTES <= capacity_bytes <= MAX_CAPACITY_BYTES:
        raise ConfigError(
            f"disk_cache_size: expected between {MIN_CAPACITY_BYTES} bytes (1 MiB) and "
            f"{MAX_CAPACITY_BYTES} (64 TiB), got {capacity_bytes}"
        )


def check_place(path: Path, *, is_read_only: bool) -> None:
    """Whether a cache is or can be at ``path``, as far as can be said without creating anything.

    Raises ``ConfigError`` with the remedy."""
    path = expand_home(path).absolute()
    if path.exists():
        check_directory(path, is_read_only=is_read_only)
    elif is_read_only:
        raise ConfigError(f"{path}: there is no such cache; check the path")
    else:
        _refuse_network(path)
        parent = next(each for each in path.parents if each.exists())
        if not parent.is_dir():
            raise ConfigError(f"{path}: cannot be created: a part of the path is a file")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{path}: cannot be created: {parent} may not be written")


def prepare_directory(path: Path, *, is_read_only: bool) -> Path:
    """The checked directory, absolute; created with mode 0700 where it is missing.

    Raises ``ConfigError`` with the remedy. Read-only: nothing is created, and the owner may differ.
    """
    path = expand_home(path).absolute()
    check_place(path, is_read_only=is_read_only)
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            reason = error.strerror
            if isinstance(error, FileExistsError | NotADirectoryError):
                reason = "a part of the path is a file"
            raise ConfigError(f"{path}: cannot be created: {reason}") from error
    check_directory(path, is_read_only=is_read_only)
    return path


def check_directory(path: Path, *, is_read_only: bool) -> None:
    """An existing directory that may hold a cache. Raises ``ConfigError``."""
    if not path.is_dir():
        raise ConfigError(f"{path}: expected a directory for the cache, this is a file")
    info = path.stat()
    if stat.S_IMODE(info.st_mode) & stat.S_IWOTH:
        raise ConfigError(
            f"{path}: anyone may write there, and so forge the cache; chmod 0700 {path}"
        )
    if info.st_uid != os.geteuid() and not is_read_only:
        raise ConfigError(
            f"{path}: belongs to user {info.st_uid}, not to {os.geteuid()}; "
            f"chown it, or choose a directory of your own"
        )
    _refuse_network(path)
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(
            f"{path}: user {os.geteuid()} may not read it; it is readable by its owner, user "
            f"{info.st_uid}, only"
        )
    if not is_ours(path):
        raise ConfigError(f"{path}: holds another LMDB database; choose an empty directory")
    if not (path / DATA_FILE).exists():
        others = [name for name in os.listdir(path) if not _is_our_name(name)]
        if others:
            raise ConfigError(
                f"{path}: is not a cache and not empty (has {sorted(others)[0]}); "
                "name a cache, or a new or an empty directory for one"
            )


def allocated_bytes(file: Path) -> int:
    """What the file takes on its volume; 0 when it is missing."""
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0


def _is_our_name(name: str) -> bool:
    return name in (LOCK_FILE, ATTACH_FILE) or ASIDE_MARK in name or TEMPORARY_MARK in name


def _refuse_network(path: Path) -> None:
    kind = file_system(path)
    if kind in _NETWORK:
        raise ConfigError(
            f"{path}: is on a network file system ({kind}), where processes would damage each "
            "other's cache; choose a local disk"
        )


def file_system(path: Path) -> str | None:
    """Type of the file system of ``path``, or of its nearest existing parent; None if unknown."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        device = path.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = None
    for mount in mounts:
        fields, _, after = mount.partition(" - ")
        if fields.split()[2] == wanted:
            found = after.split()[0]
    return found
