"""The GGUF reader: every value type, and every way in which a file can be wrong."""

import struct
import time
from pathlib import Path

import pytest

from endstop.protocol.errors import BrokenModel, UnsupportedModel
from endstop.protocol.gguf import TENSOR_TYPES, read_gguf_metadata
from tests.protocol.model_dirs import ARRAY, STRING, gguf_bytes, gguf_string, smollm2

GOOD = {"general.architecture": (STRING, "llama"), "llama.block_count": (4, 30)}


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def test_every_value_type(tmp_path):
    values = {
        "u8": (0, 255),
        "i8": (1, -128),
        "u16": (2, 65535),
        "i16": (3, -32768),
        "u32": (4, 2**32 - 1),
        "i32": (5, -(2**31)),
        "f32": (6, 0.5),
        "yes": (7, True),
        "no": (7, False),
        "text": (STRING, "añ<|x|>"),
        "u64": (10, 2**64 - 1),
        "i64": (11, -(2**63)),
        "f64": (12, 0.1),
        "ints": (ARRAY, (5, [1, -2, 3])),
        "flags": (ARRAY, (7, [True, False])),
        "texts": (ARRAY, (STRING, ["a", "", "日本"])),
        "nested": (ARRAY, (ARRAY, [(4, [1, 2]), (4, [])])),
        "empty": (ARRAY, (STRING, [])),
    }
    meta = read_gguf_metadata(write(tmp_path, gguf_bytes(values)))
    assert meta.version == 3
    assert meta.metadata == {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": 0.5,
        "yes": True,
        "no": False,
        "text": "añ<|x|>",
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "ints": [1, -2, 3],
        "flags": [True, False],
        "texts": ["a", "", "日本"],
        "nested": [[1, 2], []],
        "empty": [],
    }
    assert meta.metadata["yes"] is True


def test_tensors_rows_first_with_absolute_offsets(tmp_path):
    # Q8_0: blocks of 32 values in 34 bytes; the second tensor starts at the next multiple of 32.
    tensors = [
        ("token_embd.weight", (32, 5), 8, bytes(170)),
        ("norm", (3,), 0, struct.pack("<3f", 1, 2, 3)),
        ("odd", (7,), 99, b"1234"),
    ]
    path = write(tmp_path, gguf_bytes(GOOD, tensors))
    meta = read_gguf_metadata(path)
    first, second, third = meta.tensors
    assert (first.name, first.shape, first.type, first.size) == ("token_embd.weight", (5, 32), "Q8_0", 170)
    assert second.offset == first.offset + 192
    assert path.read_bytes()[second.offset : second.offset + 12] == struct.pack("<3f", 1, 2, 3)
    assert (third.type, third.size) == ("type 99", None)
    assert meta.vocab_size == 5
    assert meta.architecture == "llama"


def test_lm_head_wins_over_the_embedding(tmp_path):
    tensors = [("token_embd.weight", (2, 3), 0, bytes(24)), ("output.weight", (2, 4), 0, bytes(32))]
    assert read_gguf_metadata(write(tmp_path, gguf_bytes(GOOD, tensors))).vocab_size == 4


def test_alignment_of_the_file(tmp_path):
    metadata = {**GOOD, "general.alignment": (4, 64)}
    path = write(tmp_path, gguf_bytes(metadata, [("a", (1,), 0, b"\0\0\0\0")], alignment=64))
    assert read_gguf_metadata(path).tensors[0].offset % 64 == 0


def test_type_sizes_agree_with_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    theirs = {kind.value: (kind.name, block, size) for kind, (block, size) in gguf.GGML_QUANT_SIZES.items()}
    assert {number: entry for number, entry in TENSOR_TYPES.items() if number in theirs} == theirs


FOREIGN = {
    "empty": (b"", "is empty"),
    "zip": (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "html": (b"<!DOCTYPE html><html></html>", "is a web page"),
    "version cut": (b"GGUF\x03\x00", "is truncated: it ends at byte 6, within the version"),
    "too many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims 1152921504606846976 metadata keys"),
    "too many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 10**9, 0), "claims 1000000000 tensors"),
    "long string": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 10**6) + bytes(50),
        "truncated",
    ),
    "long array": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<IIQ", 9, 4, 10**12),
        "truncated: .* within the value of k",
    ),
    "many strings": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<IIQ", 9, 8, 10**12),
        "claims 1000000000000 strings in k",
    ),
    "value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<I", 77) + bytes(40),
        "unknown value type 77",
    ),
    "bad key": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string(b"\xff\xfe") + struct.pack("<IB", 0, 1),
        "has no name where key 1 of 1 should have one",
    ),
    "dimensions": (
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + gguf_string("t") + struct.pack("<I", 1000) + bytes(40),
        "1000 dimensions",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_wrong_files_are_one_sentence(tmp_path, name):
    data, message = FOREIGN[name]
    path = write(tmp_path, data)
    with pytest.raises(BrokenModel, match=message) as caught:
        read_gguf_metadata(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "message"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")]
)
def test_other_versions(tmp_path, version, message):
    with pytest.raises(UnsupportedModel, match=message):
        read_gguf_metadata(write(tmp_path, gguf_bytes(GOOD, version=version)))


def test_keys_and_tensors_twice(tmp_path):
    pair = gguf_string("k") + struct.pack("<IB", 0, 1)
    with pytest.raises(BrokenModel, match="metadata key 'k' twice"):
        read_gguf_metadata(write(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + pair))
    with pytest.raises(BrokenModel, match="tensor t twice"):
        read_gguf_metadata(write(tmp_path, gguf_bytes(GOOD, [("t", (1,), 0, bytes(4))] * 2)))


def test_every_truncation_is_noticed(tmp_path):
    whole = gguf_bytes(
        {**GOOD, "tokens": (ARRAY, (STRING, ["aa", "b"]))}, [("token_embd.weight", (2, 3), 0, bytes(24))]
    )
    path = write(tmp_path, whole)
    assert read_gguf_metadata(path).vocab_size == 3
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenModel):
            read_gguf_metadata(path)


def test_truncated_tensor_data_names_the_tensor(tmp_path):
    whole = gguf_bytes(GOOD, [("blk.0.w", (2, 3), 0, bytes(24))])
    with pytest.raises(BrokenModel, match=r"the tensor blk\.0\.w needs bytes up to"):
        read_gguf_metadata(write(tmp_path, whole[:-1]))


def test_bad_alignment_and_rows(tmp_path):
    with pytest.raises(BrokenModel, match=r"general\.alignment 0"):
        read_gguf_metadata(write(tmp_path, gguf_bytes({"general.alignment": (4, 0)})))
    with pytest.raises(BrokenModel, match="rows of 33 values"):
        read_gguf_metadata(write(tmp_path, gguf_bytes(GOOD, [("t", (33,), 8, bytes(68))])))


def test_missing_file(tmp_path):
    with pytest.raises(BrokenModel, match="No such file"):
        read_gguf_metadata(tmp_path / "none.gguf")


def test_smollm2_opens_quickly():
    path = smollm2()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        meta = read_gguf_metadata(path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
    assert len(meta.metadata["tokenizer.ggml.tokens"]) == 49152 == meta.vocab_size
    assert len(meta.tensors) == 272
    assert meta.tensor("blk.0.ffn_down.weight").shape == (576, 1536)
