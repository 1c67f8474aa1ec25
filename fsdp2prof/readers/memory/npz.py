"""NumPy archives from anywhere, read strictly: plain one-dimensional arrays of integers and booleans.

``numpy.load`` evaluates headers as Python text, decompresses by any method and allocates whatever a header
says. Here a member is what ``numpy.savez`` and ``savez_compressed`` write of such an array, or it is refused.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Arrays", "read_npz"]

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '(<i8|<i4|\|b1|\|u1)', 'fortran_order': False, "
    rb"'shape': \((\d{1,12}),\), \} *\n",
    re.DOTALL,
)
_LONGEST_HEADER = 256
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_EXPANSION, _EXPANDS_FREELY_BYTES = 100, 16 << 20
"""Recordings compress fivefold to tenfold: one that grows more is made to fill the memory."""


def read_npz(path: Path) -> Arrays:
    """Read every array of an archive, by name. Raises ``ValueError`` for anything else, ``OSError``."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if size > _MOST_EXPANSION * path.stat().st_size + _EXPANDS_FREELY_BYTES:
                raise ValueError(f"grows more than {_MOST_EXPANSION}-fold when it is decompressed")
            return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"not a NumPy archive: {error}") from None


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    if member.compress_type not in _METHODS:
        raise ValueError(f"{member.filename} is compressed by an unknown method")
    content = archive.read(member)
    header = _HEADER.match(content[:_LONGEST_HEADER])
    if header is None or header.end() != 10 + int.from_bytes(header[1], "little"):
        raise ValueError(f"{member.filename} is no one-dimensional array of integers")
    dtype, length = np.dtype(header[2].decode()), int(header[3])
    if len(content) != header.end() + length * dtype.itemsize:
        raise ValueError(f"{member.filename} does not have the {length} entries it says it has")
    array: npt.NDArray[Any] = np.frombuffer(content, dtype=dtype, offset=header.end()).copy()
    if dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError(f"{member.filename} has booleans that are none")
    return array
