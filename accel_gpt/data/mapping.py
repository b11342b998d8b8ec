"""Shard files mapped one behind the other into one row of addresses.

So a window of any shard is a slice of one array, many windows are one call of numpy, and no file
descriptor stays open: Python's own `mmap` keeps one for each map, and a process may have 1,024 of
them on many systems. Linux allows 65,530 maps.
"""

import ctypes
import errno
import functools
import mmap
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_gpt.errors import DataError

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # Linux; macOS ignores the second
Signature = tuple[int, int, int, int]


class NoMaps(DataError):
    """The process has as many maps as the system allows, or no addresses left."""


@functools.cache
def system() -> types.SimpleNamespace:
    """mmap and munmap of the C library."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return types.SimpleNamespace(mmap=library.mmap, munmap=library.munmap)


class Pages:
    """Addresses for files of `sizes` bytes (S,), whose tokens begin `offsets` bytes (S,) in.

    `flat`: all tokens as one array; those of shard s begin at `first[s]`, and may be touched only
    while `mapped[s]`. The addresses are given back when nothing refers to `flat` any more.
    """

    def __init__(
        self, sizes: NDArray[np.int64], offsets: NDArray[np.int64], dtype: np.dtype[Any]
    ) -> None:
        if (offsets % dtype.itemsize).any():
            raise DataError(f"the tokens begin {offsets.max()} bytes in, no multiple of {dtype}")
        self.sizes = sizes
        spans = -(-sizes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.starts = np.cumsum(spans) - spans
        self.region = _Region(int(spans.sum()))
        self.address = self.region.address
        self.flat: NDArray[Any] = np.asarray(self.region).view(dtype)
        self.first: NDArray[np.int64] = (self.starts + offsets) // dtype.itemsize
        self.mapped = np.zeros(len(sizes), bool)
        self.signatures: dict[int, Signature] = {}

    def map(self, number: int, path: Path) -> None:
        """Map the file of a shard; `DataError` unless it has the size that it should have."""
        size = int(self.sizes[number])
        found = signature(path)
        if found[2] != size:
            raise DataError(
                f"shard {path} has {found[2]} bytes, expected {size}; it was "
                f"{'cut short' if found[2] < size else 'changed'}: prepare the data again"
            )
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"shard {path} cannot be read: {error.strerror}") from None
        try:
            self.region.save()
            place(self.at(number), size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, descriptor)
        finally:
            os.close(descriptor)
        self.signatures[number] = found
        self.mapped[number] = True

    def drop(self, number: int) -> None:
        """Give back the pages of a shard; its addresses stay reserved."""
        self.mapped[number] = False
        size, flags = int(self.sizes[number]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        try:
            place(self.at(number), size, 0, flags | MAP_NORESERVE, -1)
        except NoMaps:  # at its limit Linux refuses even to replace a map
            self.region.spend()
            place(self.at(number), size, 0, flags | MAP_NORESERVE, -1)

    def check(self, number: int, path: str) -> None:
        """`DataError` if the file was cut short, grown or replaced since it was mapped."""
        if signature(path) != self.signatures[number]:
            raise DataError(
                f"shard {path} was changed while it was being read; restore it and launch again"
            )

    def at(self, number: int) -> int:
        """Address of the first byte of a shard's file."""
        return self.address + int(self.starts[number])


def signature(path: str | Path) -> Signature:
    """Device, inode, size in bytes and time of change of a file, or `DataError`."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise DataError(f"shard {path} cannot be found: {error.strerror}; restore it") from None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def place(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    """mmap(2): `size` bytes at `address`, or anywhere for None; where they are."""
    found = system().mmap(address, size, protection, flags, descriptor, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        kind = NoMaps if number == errno.ENOMEM else DataError
        raise kind(f"{size} bytes of shards cannot be mapped into memory: {os.strerror(number)}")
    return int(found)


class _Region:
    """Reserved addresses, as numpy's array interface of bytes; given back with this object.

    `spare`: address of a map that can be given up when there are too many; 0: it was.
    """

    def __init__(self, size: int) -> None:
        self.size, self.spare = size, 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.address = place(None, size, 0, flags, -1)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (self.address, True),
        }

    def save(self) -> None:
        """Have a spare map; shared ones are not joined with their neighbours."""
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.spare = self.spare or place(None, mmap.PAGESIZE, 0, flags, -1)

    def spend(self) -> None:
        """Give up the spare map."""
        if self.spare:
            system().munmap(self.spare, mmap.PAGESIZE)
            self.spare = 0

    def __del__(self) -> None:
        if hasattr(self, "address"):
            system().munmap(self.address, self.size)
            self.spend()
