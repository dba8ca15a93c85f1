from __future__ import annotations

from dataclasses import dataclass, field

from endstop.view.conversation import rendered_text


@dataclass
class Rendering:
    """The fields of `Rendered` that are drawn."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]
    mask: list[int] | None
    escaped: list[tuple[int, int]] = field(default_factory=list)


def styles(rendering: Rendering) -> list[tuple[str, str]]:
    text = rendered_text(rendering)  # type: ignore[arg-type]
    assert text.plain.replace("⟨U+001B⟩", "\x1b") == rendering.text
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_what_the_model_says_is_green_and_escaped_text_blue() -> None:
    rendering = Rendering(
        "U:<x>|A:hi<e>",
        [1, 2, 3, 4, 5],
        [(0, 2), (2, 5), (5, 8), (8, 10), (10, 13)],
        [0, 0, 0, 1, 1],
        [(2, 5)],
    )
    assert styles(rendering) == [
        ("U:", "dim"),
        ("<x>", "blue underline"),
        ("|A:", "dim"),
        ("hi", "bold green"),
        ("<e>", "bold green"),
    ]


def test_tokens_within_a_character_and_text_between_tokens() -> None:
    assert styles(Rendering("a谢 b", [1, 2, 3, 4], [(0, 1), (1, 2), (1, 2), (3, 4)], None)) == [("a", "dim")]
    assert styles(Rendering("\x1b[31m[bold]x", [1], [(0, 12)], [1])) == [
        ("⟨U+001B⟩[31m[bold]x"[:19], "bold green")
    ]
