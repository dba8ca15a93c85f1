"""Reading the head of a GGUF file: its metadata and the list of its tensors, without numpy.

A GGUF file is, little-endian: magic, version, tensor count, key count, the key/value pairs, the
tensor infos, padding, tensor data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
Files of a hundred megabytes open in some 60 ms, because only the head is decoded. The tensors
themselves are read elsewhere; here it is only checked that the file is long enough to hold them.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.protocol.errors import BrokenModel, UnsupportedModel
from endstop.protocol.gguf_tokenizer import (
    generation_config_from_gguf,
    tokenizer_config_from_gguf,
    tokenizer_json_from_gguf,
)

__all__ = [
    "GGUFMetadata",
    "GGUFTensor",
    "generation_config_from_gguf",
    "read_gguf_metadata",
    "tokenizer_config_from_gguf",
    "tokenizer_json_from_gguf",
]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Type number -> struct letter. 7 is a one-byte boolean, 8 a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MAX_DIMENSIONS = 8
_MAX_ARRAY_DEPTH = 4
_LONGEST_NAME = 1024

# Number in the file -> (name, values in a block, bytes of a block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's entry in the head.

    Attributes:
        name: as in the file, for instance `blk.0.attn_q.weight`.
        shape: rows first, as torch has it (the file stores the fastest dimension first).
        type: `F32`, `Q4_1`, ...; `type 77` for a number this reader does not know.
        offset: first byte of the data, counted from the start of the file.
        size: bytes of the data, None for an unknown type.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size: int | None


@dataclass(frozen=True)
class GGUFMetadata:
    """The head of a GGUF file.

    Attributes:
        path: the file it was read from.
        version: 2 or 3.
        metadata: every key with its value: int, float, bool, str or a list of them.
        tensors: in the order of the file.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: list[GGUFTensor]

    @property
    def architecture(self) -> str:
        """`general.architecture`, or "" where the key is missing."""
        return str(self.metadata.get("general.architecture", ""))

    def tensor(self, name: str) -> GGUFTensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the lm_head (of the embedding where they are tied), None without such a tensor."""
        head = self.tensor("output.weight") or self.tensor("token_embd.weight")
        return head.shape[0] if head is not None and len(head.shape) == 2 else None


def read_gguf_metadata(path: str | Path) -> GGUFMetadata:
    """The metadata and the tensor list of a GGUF file.

    Raises BrokenModel for a file that is no GGUF, is truncated (also in its tensor data) or
    contradicts itself, UnsupportedModel for a version or byte order this reader does not know.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise BrokenModel(f"{path} is empty; fetch the model again.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(path, view, size).read()
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}.") from error


class _Reader:
    """A cursor over the head; every read is checked against the end of the file."""

    def __init__(self, path: Path, view: mmap.mmap, size: int) -> None:
        self.path = path
        self.view = view
        self.size = size
        self.at = 0

    def read(self) -> GGUFMetadata:
        version = self._version()
        tensor_count = self._u64("the tensor count")
        key_count = self._u64("the key count")
        # The smallest entries: a key of length 0 with a one-byte value, a tensor without dimensions.
        self._plausible("metadata keys", key_count, 13)
        self._plausible("tensors", tensor_count, 24)
        metadata: dict[str, Any] = {}
        for index in range(key_count):
            key = self._name(f"key {index + 1} of {key_count}")
            if key in metadata:
                raise self._broken(f"holds the metadata key {key!r} twice")
            metadata[key] = self._value(self._u32(f"the type of {key}"), key)
        infos = [self._tensor_info(index, tensor_count) for index in range(tensor_count)]
        return GGUFMetadata(self.path, version, metadata, self._tensors(infos, metadata))

    def _version(self) -> int:
        magic = self.view[:4]
        if magic != MAGIC:
            raise self._foreign()
        self.at = 4
        version = self._u32("the version")
        if version in VERSIONS:
            return version
        if struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS:
            raise UnsupportedModel(
                f"{self.path} is a big-endian GGUF file; endstop reads little-endian ones."
            )
        raise UnsupportedModel(
            f"{self.path} is GGUF version {version}, endstop reads versions 2 and 3; convert the model again."
        )

    def _foreign(self) -> BrokenModel:
        start = self.view[:64]
        if start.startswith(b"version https://git-lfs"):
            return BrokenModel(
                f"{self.path} is a Git LFS pointer, not the model; fetch it with `git lfs pull`."
            )
        if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
            return BrokenModel(f"{self.path} is a web page, not a model; fetch the file itself.")
        return BrokenModel(f"{self.path} is not a GGUF file: it does not start with the four bytes GGUF.")

    def _broken(self, what: str) -> BrokenModel:
        return BrokenModel(f"{self.path} {what}; the file is damaged, fetch it again.")

    def _truncated(self, what: str) -> BrokenModel:
        return BrokenModel(
            f"{self.path} is truncated: it ends at byte {self.size}, within {what}; fetch the model again."
        )

    def _plausible(self, what: str, count: int, smallest: int) -> None:
        if count * smallest > self.size - self.at:
            raise self._broken(f"claims {count} {what} but has only {self.size} bytes")

    def _u32(self, what: str) -> int:
        if self.at + 4 > self.size:
            raise self._truncated(what)
        value: int = _U32.unpack_from(self.view, self.at)[0]
        self.at += 4
        return value

    def _u64(self, what: str) -> int:
        if self.at + 8 > self.size:
            raise self._truncated(what)
        value: int = _U64.unpack_from(self.view, self.at)[0]
        self.at += 8
        return value

    def _string(self, what: str) -> str:
        length = self._u64(what)
        end = self.at + length
        if end > self.size:
            raise self._truncated(what)
        data = self.view[self.at : end]
        self.at = end
        return data.decode("utf-8", "replace")

    def _name(self, what: str) -> str:
        """A key or a tensor's name; bytes that are no name show that the place in the file is lost."""
        name = self._string(what)
        if len(name) > _LONGEST_NAME or "\ufffd" in name or not name.isprintable():
            raise self._broken(f"has no name where {what} should have one")
        return name

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        what = f"the value of {key}"
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(key, depth + 1)
        return self._numbers(kind, 1, key)[0]

    def _array(self, key: str, depth: int) -> list[Any]:
        what = f"the array {key}"
        if depth > _MAX_ARRAY_DEPTH:
            raise self._broken(f"nests the array {key} more than {_MAX_ARRAY_DEPTH} deep")
        kind = self._u32(what)
        count = self._u64(what)
        if kind == _STRING:
            self._plausible(f"strings in {key}", count, 8)
            return self._strings(count, what)
        if kind == _ARRAY:
            self._plausible(f"arrays in {key}", count, 12)
            return [self._array(key, depth + 1) for _ in range(count)]
        return self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        letter = "B" if kind == _BOOL else _SCALARS.get(kind)
        if letter is None:
            raise self._broken(f"gives {key} the unknown value type {kind}")
        size = struct.calcsize(letter) * count
        if self.at + size > self.size:
            raise self._truncated(f"the value of {key}")
        values = list(struct.unpack_from(f"<{count}{letter}", self.view, self.at))
        self.at += size
        return [value != 0 for value in values] if kind == _BOOL else values

    def _strings(self, count: int, what: str) -> list[str]:
        # A vocabulary and its merges are some hundred thousand strings, so this loop has no calls to spare.
        view, at, size = self.view, self.at, self.size
        unpack = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        for _ in range(count):
            start = at + 8
            if start > size:
                raise self._truncated(what)
            at = start + unpack(view, at)[0]
            if at > size:
                raise self._truncated(what)
            append(view[start:at].decode("utf-8", "replace"))
        self.at = at
        return strings

    def _tensor_info(self, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        what = f"the entry of tensor {index + 1} of {count}"
        name = self._name(what)
        dimensions = self._u32(what)
        if dimensions > _MAX_DIMENSIONS:
            raise self._broken(f"gives the tensor {name} {dimensions} dimensions")
        shape = tuple(self._u64(what) for _ in range(dimensions))
        return name, shape[::-1], self._u32(what), self._u64(what)

    def _tensors(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]
    ) -> list[GGUFTensor]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
            raise self._broken(f"has general.alignment {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors: list[GGUFTensor] = []
        names: set[str] = set()
        for name, shape, kind, offset in infos:
            if name in names:
                raise self._broken(f"lists the tensor {name} twice")
            names.add(name)
            type_name, block, block_bytes = TENSOR_TYPES.get(kind, (f"type {kind}", 0, 0))
            size: int | None = None
            if block:
                if shape and shape[-1] % block:
                    raise self._broken(f"has the {type_name} tensor {name} with rows of {shape[-1]} values")
                size = math.prod(shape) // block * block_bytes
            if start + offset + (size or 0) > self.size:
                raise BrokenModel(
                    f"{self.path} is truncated: the tensor {name} needs bytes up to "
                    f"{start + offset + (size or 0)}, the file has {self.size}; fetch the model again."
                )
            tensors.append(GGUFTensor(name, shape, type_name, start + offset, size))
        return tensors
