from endstop.protocol.stream_parts import StreamTags, stream_parts
from endstop.protocol.tokenbytes import TokenBytes

PIECES = TokenBytes([bytes([i]) for i in range(100)] + [b"<t>"] * 5, special=set(range(100, 105)))
TAGS = StreamTags(100, 101, 102, 103)
END = 104


def parts(*items: str | int) -> list[tuple[str, str]]:
    ids = [i for item in items for i in (item.encode() if isinstance(item, str) else [item])]
    return [(part["type"], part["text"]) for part in stream_parts(ids, PIECES, TAGS)]


def test_a_call_its_output_and_the_words_around_them():
    assert parts("= ", 100, "1+2", 101, 102, "3", 103, "3", END) == [
        ("text", "= "),
        ("python", "1+2"),
        ("python_output", "3"),
        ("text", "3"),
    ]


def test_an_answer_without_tags_is_one_part_and_an_empty_one_is_none():
    assert parts("AB", END) == [("text", "AB")]
    assert parts(END) == []


def test_a_region_that_is_not_closed_reaches_to_the_end_and_an_empty_one_is_kept():
    assert parts(100, 101, 100, "1+") == [("python", ""), ("python", "1+")]


def test_a_close_tag_without_its_open_tag_is_left_out():
    assert parts("A", 103, "B", 100, "1", 103, "2", 101) == [("text", "AB"), ("python", "12")]


def test_tags_are_found_by_name_or_not_at_all():
    names = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
    assert StreamTags.of(dict(zip(names, range(100, 104), strict=True))) == TAGS
    assert StreamTags.of(dict.fromkeys(names[:3], 1)) is None
