"""A file is believed only after its header, its ranges and its size agree."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from leyline.errors import ModelError
from leyline.model.safetensors_file import BITS, DTYPES, TensorFile

FLOATS = torch.arange(6, dtype=torch.float32).view(2, 3)
HEADER: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def file_of(path: Path, header: Any, data: bytes = bytes(32), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return HEADER | {name: HEADER[name] | fields}


def refusal(path: Path, *parts: str) -> None:
    with pytest.raises(ModelError) as caught:
        TensorFile(path)
    message = caught.value.message
    assert all(part in message for part in (path.name, *parts)), message
    assert "\n" not in message


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model-00001-of-00001.safetensors"


def test_what_the_library_writes_is_read(path):
    tensors = {
        "a": FLOATS,
        "b": torch.randn(3, 1, 5).bfloat16(),
        "c": torch.randn(2, 2).half(),
        "d": torch.randn(7).double(),
        "e": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 3),
        "one": torch.tensor(3.0),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    file = TensorFile(path)
    assert sorted(file.entries) == sorted(tensors)
    for name, want in tensors.items():
        got = file.view(name)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got.double(), want.double())
        del got
        file.done(name)
    assert torch.equal(file.view("a"), FLOATS)  # pages that were given back come again


def test_a_tensor_is_read_to_where_it_stays(path):
    tensors = {"a": FLOATS, "b": torch.randn(3, 1, 5).bfloat16(), "none": torch.empty(0, 3)}
    save_file(tensors, path)
    file = TensorFile(path)
    for name, want in tensors.items():
        for dtype in (want.dtype, torch.float32, torch.bfloat16):
            place = torch.full(want.shape, float("nan"), dtype=dtype)
            file.read_into(name, place)
            assert torch.equal(place, want.to(dtype))


def test_a_place_may_have_gaps_that_stay(path):
    save_file({"a": FLOATS}, path)
    wide = torch.zeros(2, 6)
    TensorFile(path).read_into("a", wide[:, ::2])
    assert torch.equal(wide[:, ::2], FLOATS) and not wide[:, 1::2].any()


def test_reading_straight_maps_nothing(path):
    save_file({"a": FLOATS}, path)
    file = TensorFile(path)
    file.read_into("a", torch.empty(2, 3))
    assert file._map is None
    file.read_into("a", torch.empty(2, 3).bfloat16())
    assert file._map is not None


def test_the_system_may_give_less_than_was_asked_for(path, monkeypatch):
    save_file({"a": FLOATS}, path)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, to, at: whole(file, [to[0][:5]], at))
    place = torch.empty(2, 3)
    TensorFile(path).read_into("a", place)
    assert torch.equal(place, FLOATS)


def test_a_file_that_becomes_shorter_is_refused(path):
    save_file({"a": FLOATS}, path)
    file = TensorFile(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelError, match="cut short while it was read"):
        file.read_into("a", torch.empty(2, 3))


def test_a_closed_file_is_not_read(path):
    save_file({"a": FLOATS}, path)
    file = TensorFile(path)
    view = file.view("a")
    file.close()
    file.close()
    other = path.open("rb")  # takes over the number that the system knew the file by
    with other, pytest.raises(ModelError, match="cannot be read: Bad file descriptor"):
        file.read_into("a", torch.empty(2, 3))
    assert torch.equal(view, FLOATS)


def test_a_byte_that_changes_is_seen(path):
    save_file({"a": FLOATS}, path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x41")
    assert not torch.equal(TensorFile(path).view("a"), FLOATS)


@pytest.mark.parametrize("padding", [0, 1, 2, 3, 5])
def test_tensors_need_not_be_aligned(path, padding):
    text = json.dumps({"a": HEADER["a"]}).encode()
    text += b" " * (-len(text) % 8 + padding)
    file_of(path, text, FLOATS.numpy().tobytes())
    assert torch.equal(TensorFile(path).view("a"), FLOATS)


def test_tensors_may_lie_in_any_order(path):
    swapped = {
        "a": HEADER["a"] | {"data_offsets": [8, 32]},
        "b": HEADER["b"] | {"data_offsets": [0, 8]},
    }
    file_of(path, swapped, bytes(8) + FLOATS.numpy().tobytes())
    file = TensorFile(path)
    assert list(file.entries) == ["b", "a"]
    assert torch.equal(file.view("a"), FLOATS) and not file.view("b").any()


def test_other_dtypes_may_lie_beside(path):
    header = {
        "ids": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "packed": {"dtype": "F4", "shape": [4, 4], "data_offsets": [16, 24]},
        "b": HEADER["b"] | {"data_offsets": [24, 32]},
    }
    assert torch.equal(TensorFile(file_of(path, header)).view("b"), torch.zeros(4).bfloat16())


def test_every_dtype_has_the_size_that_torch_gives_it():
    assert all(BITS[name] == 8 * dtype.itemsize for name, dtype in DTYPES.items())


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_a_file_shorter_than_its_length_field(path, kept):
    path.write_bytes(bytes(kept))
    refusal(path, "cut short", f"{kept} bytes")


@pytest.mark.parametrize("length", [1000, 2**20])
def test_a_header_longer_than_the_file(path, length):
    refusal(file_of(path, HEADER, length=length), "cut short", f"header has {length:,} bytes")


@pytest.mark.parametrize("length", [2**30, 2**62, 2**64 - 1])
def test_a_header_longer_than_any(path, length):
    refusal(file_of(path, HEADER, length=length), "no safetensors file")


@pytest.mark.parametrize("lost", [1, 8, 9, 31, 32])
def test_data_that_is_cut_short(path, lost):
    first = "a" if lost > 8 else "b"
    refusal(file_of(path, HEADER, bytes(32 - lost)), f"{lost} bytes are missing", f"tensor {first}")


def test_data_behind_the_last_tensor(path):
    refusal(file_of(path, HEADER, bytes(33)), "1 bytes behind its last tensor")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_header_that_is_none(path, text):
    refusal(file_of(path, text), "header that is")


def test_a_name_that_is_there_twice(path):
    text = json.dumps(HEADER).replace('"b"', '"a"').encode()
    refusal(file_of(path, text), "a is there twice")


@pytest.mark.parametrize(
    "header, parts",
    [
        (changed("b", data_offsets=[16, 24]), ("tensor b", "overlaps the tensor a")),
        (changed("b", data_offsets=[25, 33]), ("tensor b", "leaves a gap behind the tensor a")),
        (changed("a", data_offsets=[4, 28]), ("tensor a", "leaves a gap behind the header")),
        ({"b": HEADER["b"]}, ("tensor b", "leaves a gap behind the header")),
        (changed("a", data_offsets=[0, 20]), ("tensor a", "needs 24")),
        (changed("a", data_offsets=[24, 0]), ("tensor a", "needs 24")),
        (changed("a", data_offsets=[0, 24, 32]), ("tensor a", "offsets")),
        (changed("a", data_offsets=[-24, 0]), ("tensor a", "offsets")),
        (changed("a", data_offsets=[0.0, 24.0]), ("tensor a", "offsets")),
        (changed("a", data_offsets=[False, 24]), ("tensor a", "offsets")),
        (changed("a", data_offsets="0-24"), ("tensor a", "offsets")),
        (changed("a", data_offsets=None), ("tensor a", "offsets")),
        (changed("b", data_offsets=[2**62, 2**62 + 8]), ("tensor b", "gap")),
        (changed("a", shape=[2, 4]), ("tensor a", "needs 32")),
        (changed("a", shape=[-2, -3]), ("tensor a", "shape")),
        (changed("a", shape=[2**40, 2**40]), ("tensor a", "needs")),
        (changed("a", shape="2x3"), ("tensor a", "shape")),
        (changed("a", shape=[6.0]), ("tensor a", "shape")),
        (changed("a", dtype="F16"), ("tensor a", "needs 12")),
        (changed("a", dtype="F128"), ("tensor a", "F128", "unknown")),
        (changed("a", dtype=["F32"]), ("tensor a", "unknown")),
        (changed("b", dtype="F4", shape=[17]), ("tensor b", "needs 8.5")),
        (HEADER | {"a": []}, ("tensor a", "unknown")),
    ],
)
def test_entries_that_cannot_be(path, header, parts):
    refusal(file_of(path, header), *parts)


def test_a_file_that_is_not_there(path):
    refusal(path, "cannot be read", "No such file")


def test_a_damaged_header_never_reads_wild(path):
    """Any change of header bytes is refused, or reads what lies inside the file."""
    save_file({"a": FLOATS, "b": torch.ones(4).bfloat16()}, path)
    good, generator = path.read_bytes(), random.Random(0)
    header_end = 8 + int.from_bytes(good[:8], "little")
    refused = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(header_end)] = generator.choice(b'0123456789"[]{},:abFBX\0')
        path.write_bytes(damaged)
        try:
            file = TensorFile(path)
        except ModelError:
            refused += 1
            continue
        for name, entry in file.entries.items():
            assert header_end <= entry.start <= entry.end <= len(damaged)
            if entry.dtype in DTYPES:
                assert file.view(name).shape == entry.shape
    assert refused > 300


@pytest.mark.parametrize("seed", range(5))
def test_the_library_reads_the_same(path, seed):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    tensors = {
        f"t{i}": torch.randn([generator.randrange(5) for _ in range(generator.randrange(4))]).to(
            generator.choice(kinds)
        )
        for i in range(12)
    }
    save_file(tensors, path)
    theirs, ours = load_file(path), TensorFile(path)
    assert sorted(theirs) == sorted(ours.entries)
    assert all(torch.equal(theirs[name], ours.view(name)) for name in theirs)
