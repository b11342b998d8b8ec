"""A small or read-only disk for one training process: a tmpfs in a namespace of its own.

Needs no root, only a Linux that lets a process make a user namespace.
"""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accel_gpt.errors import AccelGPTError

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # unshare(2)
MS_RDONLY, MS_REMOUNT = 1, 32  # mount(2)


class NoDiskError(AccelGPTError):
    """This machine lets no process mount a disk."""

    exit_code = 99


@dataclass(frozen=True)
class Disk:
    """A tmpfs over the empty `folder`, during one launch."""

    folder: str
    size: int  # bytes
    before: str | None = None  # a folder to copy onto the disk at the start
    after: str | None = None  # the folder to which the disk is copied at the end
    free: int | None = None  # bytes; a file `filler` takes the rest
    read_only: bool = False

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount the disk around a launch."""
        folder = Path(self.folder)
        own_namespace()
        mount(folder, f"size={self.size}")
        if self.before:
            copy(Path(self.before), folder)
        if self.free is not None:
            fill(folder / "filler", self.free)
        if self.read_only:
            mount(folder, "", MS_REMOUNT | MS_RDONLY)
        try:
            yield
        finally:
            if self.after:
                copy(folder, Path(self.after))


def own_namespace() -> None:
    """Let this process mount disks that no other process sees; it must have one thread."""
    user, group = os.getuid(), os.getgid()
    called("unshare", ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def mount(folder: Path, options: str, flags: int = 0) -> None:
    """Mount a tmpfs on `folder`."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options.encode())
    called("mount", libc.mount(*arguments))


def called(name: str, result: int) -> None:
    """Raise `NoDiskError` if a system call failed."""
    if result:
        raise NoDiskError(f"{name} failed: {os.strerror(ctypes.get_errno())}")


def copy(source: Path, target: Path) -> None:
    """Copy the content of one folder into another."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def fill(path: Path, free: int) -> None:
    """Fill the disk except `free` bytes."""
    disk = os.statvfs(path.parent)
    path.write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - free)))
