"""One safetensors file, checked against its size before a byte of it is believed.

The file is: a header length (8 bytes, little endian), a JSON header, the tensors' bytes.

    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}

The ranges must tile the rest of the file exactly, without a gap, an overlap or a byte left over.
So a file that was cut anywhere is found here, and not by a bus error in the middle of loading.

A tensor is read straight to where it stays, or viewed in the mapped file where it is wanted in
another form than the stored one.

Source: the format's specification in the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard
from weakref import finalize

import torch
from torch import Tensor

from leyline.errors import ModelError
from leyline.model.parameters import Shape
from leyline.model.shards import unique_keys

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
LENGTH_BYTES = 8
PAGE = mmap.ALLOCATIONGRANULARITY
AHEAD_BYTES = 64 << 20  # the disk is kept this far ahead of the reader
# Bits an element. A dtype without a torch twin is known by size, so that files that hold one
# beside the tensors that are wanted can be checked too.
BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in a file.

    Attributes:
        dtype: The format's name of it, such as "BF16".
        shape: Its sizes.
        start: Offset of its first byte in the file.
        end: One past its last.
    """

    dtype: str
    shape: Shape
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes it takes up."""
        return self.end - self.start


class TensorFile:
    """The tensors of one file.

    Args:
        path: The file. It must not change while this object lives.

    Attributes:
        name: The file's name, without its folder.
        entries: By tensor name, in the order of the file.

    Raises:
        ModelError: It is no whole safetensors file; the message names it, and the tensor if one
            is at fault.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._map: mmap.mmap | None = None
        self._asked_for = 0  # what lies before this offset was read ahead
        try:
            self._file = os.open(path, os.O_RDONLY)
            self._close = finalize(self, os.close, self._file)
            self._size = os.fstat(self._file).st_size
            header = self._header(os.pread(self._file, LENGTH_BYTES, 0))
            text = os.pread(self._file, header, LENGTH_BYTES)
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror or error}") from error
        self.entries = self._entries(text, self._size)

    def read_into(self, name: str, place: Tensor) -> None:
        """Copy a tensor to where it stays; several threads may do that at once.

        What is in memory in another form, or on another device, goes there by way of a view.

        Args:
            name: The tensor.
            place: Of its shape; any float dtype, any device.

        Raises:
            ModelError: The file has become shorter, or cannot be read.
        """
        entry = self.entries[name]
        stays = place.device.type == "cpu" and place.dtype == DTYPES[entry.dtype]
        if stays and place.is_contiguous():
            self._read(entry, place.view(-1).view(torch.uint8).numpy().data)
        else:
            place.copy_(self.view(name))

    def view(self, name: str) -> Tensor:
        """A tensor as it is stored, as a view of the mapped file: copy it, and never write to it.

        Reading past the end of a file that shrinks meanwhile ends the process.
        """
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        self._read_ahead(entry)
        flat = torch.frombuffer(
            self._mapped(), dtype=torch.uint8, count=entry.num_bytes, offset=entry.start
        )
        if entry.start % dtype.itemsize:  # the format does not promise that they are aligned
            flat = flat.clone()
        return flat.view(dtype).view(entry.shape)

    def done(self, name: str) -> None:
        """Tell the system that the pages a tensor was viewed in are no longer needed in memory."""
        entry = self.entries[name]
        option = getattr(mmap, "MADV_DONTNEED", None)
        if option is not None and self._map is not None and entry.num_bytes:
            first = entry.start // PAGE * PAGE
            self._map.madvise(option, first, entry.end - first)

    def close(self) -> None:
        """Let go of the file; nothing more can be read, views that are there stay good."""
        self._map = None
        self._close()
        self._file = -1  # the system may give its number to another file

    def _read(self, entry: Entry, place: memoryview) -> None:
        self._read_ahead(entry)
        start = entry.start
        while place:
            try:
                count = os.preadv(self._file, [place], start)
            except OSError as error:
                raise self._refusal(f"cannot be read: {error.strerror or error}") from error
            if count == 0:
                raise self._refusal("was cut short while it was read")
            place, start = place[count:], start + count

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            # Private and writable only because torch wants a writable buffer.
            self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY)
        return self._map

    def _read_ahead(self, entry: Entry) -> None:
        """Have the disk begin on what comes next; half the distance at a time."""
        if min(entry.end + AHEAD_BYTES // 2, self._size) > self._asked_for:
            start = max(entry.start, self._asked_for)
            self._asked_for = min(entry.end + AHEAD_BYTES, self._size)
            if hasattr(os, "posix_fadvise"):
                length = self._asked_for - start
                os.posix_fadvise(self._file, start, length, os.POSIX_FADV_WILLNEED)

    def _header(self, length: bytes) -> int:
        """The header's length, checked."""
        size = self._size
        header = int.from_bytes(length, "little")
        if len(length) < LENGTH_BYTES:
            raise self._refusal(f"is cut short: it has {size} bytes, fewer than its length field")
        if header > MAX_HEADER_BYTES:
            raise self._refusal(f"is no safetensors file: it claims a header of {header:,} bytes")
        if LENGTH_BYTES + header > size:
            raise self._refusal(
                f"is cut short: its header has {header:,} bytes, the whole file {size:,}"
            )
        return header

    def _entries(self, text: bytes, size: int) -> dict[str, Entry]:
        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise self._refusal(f"has a header that is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._refusal("has a header that is no JSON object")
        header.pop("__metadata__", None)
        first = LENGTH_BYTES + len(text)
        entries = {name: self._entry(name, value, first) for name, value in header.items()}
        ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
        self._check_tiling(dict(ordered), first, size)
        return dict(ordered)

    def _entry(self, name: str, value: Any, first: int) -> Entry:
        fields = value if isinstance(value, dict) else {}
        dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in BITS:
            raise self._refusal(f"stores the tensor {name} as {dtype!r}, which is unknown")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._refusal(
                f"describes the tensor {name} with shape {shape!r} and offsets {offsets!r}"
            )
        bits = math.prod(shape) * BITS[dtype]
        if bits % 8 or offsets[1] - offsets[0] != bits // 8:
            raise self._refusal(
                f"gives the tensor {name} of shape {shape} in {dtype} the bytes {offsets[0]} to "
                f"{offsets[1]}, but it needs {bits / 8:g}"
            )
        return Entry(dtype, tuple(shape), first + offsets[0], first + offsets[1])

    def _check_tiling(self, entries: dict[str, Entry], first: int, size: int) -> None:
        """Refuse tensors that overlap, leave a gap, or do not end where the file does."""
        end, before = first, "the header"
        for name, entry in entries.items():
            if entry.start != end:
                how = "overlaps" if entry.start < end else "leaves a gap behind"
                raise self._refusal(f"has a tensor {name} that {how} {before}")
            end, before = entry.end, f"the tensor {name}"
        if end > size:
            cut = next(name for name, entry in entries.items() if entry.end > size)
            raise self._refusal(
                f"is cut short: {end - size:,} bytes are missing, from the tensor {cut} on"
            )
        if end < size:
            raise self._refusal(f"has {size - end:,} bytes behind its last tensor")

    def _refusal(self, problem: str) -> ModelError:
        return ModelError(
            f"The file {self.name} {problem}. Download the model again.", param="model"
        )


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of integers that are not negative."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
