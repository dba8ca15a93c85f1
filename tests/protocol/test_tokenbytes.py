"""The byte table of a tokenizer against what the tokenizer itself decodes."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from endstop import TokenBytes
from endstop.protocol.errors import UnsupportedModel

SENTENCEPIECE = {"a": 0, "▁": 1, "▁▁": 2, "<unk>": 3, "▁the": 4, "\n\n": 5} | {
    f"<0x{byte:02X}>": 6 + byte for byte in range(256)
}
REPLACE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(SENTENCEPIECE, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    # User-defined symbols are both in the vocabulary and added tokens, as in Gemma's files.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("▁▁", "\n\n", "<b>", "é x")])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "<b>", "é x", "日本")])
    tokenizer.add_special_tokens([AddedToken("<｜end▁of▁turn｜>", special=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        sentencepiece(decoders.Sequence(REPLACE)),
        sentencepiece(decoders.Sequence([*REPLACE, decoders.Strip(" ", 1, 0)])),
        byte_level(),
    ],
)
def test_every_token_between_two_others_is_what_the_tokenizer_decodes(tokenizer: Tokenizer) -> None:
    pieces = TokenBytes.from_tokenizer_json(json.loads(tokenizer.to_str()))
    letter = tokenizer.token_to_id("a")
    for token_id in range(tokenizer.get_vocab_size()):
        ids = [letter, token_id, letter]
        assert pieces.join(ids).decode("utf-8", "replace") == tokenizer.decode(ids, skip_special_tokens=False)


def test_blanks_that_are_added_tokens_are_blanks() -> None:
    pieces = TokenBytes.from_tokenizer_json(json.loads(sentencepiece(decoders.Sequence(REPLACE)).to_str()))
    assert pieces[2] == b"  "


def test_tokenizers_whose_tokens_have_no_bytes_of_their_own_are_refused() -> None:
    wordpiece = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    without = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for tokenizer in (wordpiece, without):
        with pytest.raises(UnsupportedModel):
            TokenBytes.from_tokenizer_json(json.loads(tokenizer.to_str()))
