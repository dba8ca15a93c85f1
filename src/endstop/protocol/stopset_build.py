"""Puts the stop set together: what the files declare, what the template writes, and where they disagree."""

from __future__ import annotations

from dataclasses import replace

from endstop.outcomes import StopRole
from endstop.protocol.declared import ModelFacts
from endstop.protocol.stopset import CONFLICTS, Conflict, Severity, Source, StopSet
from endstop.protocol.terminator import TemplateEnds, find_ends


def stop_set_of(facts: ModelFacts) -> StopSet:
    """The stop set of a model, with roles, all sources and conflicts.

    Ids at or beyond the lm_head's rows cannot be sampled: they are a conflict and no stop ids.
    """
    building = _Building(facts)
    building.take_declared()
    if facts.templates:
        building.take_template()
    building.check_files()
    return building.stop_set()


class _Building:
    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.roles: dict[int, StopRole] = {}
        self.sources: dict[int, list[Source]] = {}
        self.texts: dict[int, str] = {}
        self.conflicts: list[Conflict] = []
        self.terminator: int | None = None

    def conflict(
        self, code: str, message: str, token_id: int | None = None, severity: Severity | None = None
    ) -> None:
        self.conflicts.append(Conflict(code, message, token_id, severity or CONFLICTS[code]))

    def name(self, token_id: int) -> str:
        text = self.texts.get(token_id)
        return f"{token_id}" if text is None else f"{token_id} ({text})"

    def take_declared(self) -> None:
        for declaration in self.facts.declared:
            token_id = declaration.token_id
            role = self.roles.get(token_id)
            # eot and eom keys of a GGUF file say more than eos does.
            self.roles[token_id] = declaration.role if role in (None, "eos") else role
            self.sources.setdefault(token_id, []).append(Source(declaration.file, declaration.key))
            text = self.facts.text_of(token_id)
            if text is not None:
                self.texts[token_id] = text

    def take_template(self) -> None:
        facts = self.facts
        declared = set(self.roles)
        ends = find_ends(
            {name: template.text for name, template in facts.templates.items()},
            {text: special for text, (_, special) in facts.tokens.items()},
            [text for text, (token_id, _) in facts.tokens.items() if token_id in declared],
            facts.special_tokens,
        )
        for text in ends.tool_ends:
            self._add(text, "tool_end", "tool_use", ", end of a tool call")
        for text in ends.turn_ends:
            plain = text == ends.terminator
            self._add(text, "turn_end", "default" if plain else "tool_use", ", end of an assistant turn")
        if ends.terminator is not None:
            self.terminator = facts.tokens[ends.terminator][0]
        self._compare(ends, declared)

    def _add(self, text: str, role: StopRole, template_name: str, what: str) -> None:
        templates = self.facts.templates
        template = templates.get(template_name) or templates.get("default") or next(iter(templates.values()))
        token_id = self.facts.tokens[text][0]
        self.roles[token_id] = role
        self.texts[token_id] = text
        self.sources.setdefault(token_id, []).append(Source(template.file, template.key + what))

    def _compare(self, ends: TemplateEnds, declared: set[int]) -> None:
        """Conflicts between the template and the files."""
        ids = {text: token_id for text, (token_id, _) in self.facts.tokens.items()}
        for text in ends.turn_ends:
            if ids[text] not in declared:
                self._undeclared(ids[text])
        for text in ends.tool_ends:
            if ids[text] not in declared:
                self.conflict(
                    "undeclared_tool_end",
                    f"the chat template ends tool calls with {self.name(ids[text])}, which no file declares: "
                    "software that reads only the files runs on behind a call.",
                    ids[text],
                )
        if ends.turn_ends:
            # One declared stop that templates never write is common; a model with no written stop is not.
            none_written = not any(self.texts.get(token_id) in ends.written for token_id in declared)
            for token_id in sorted(declared):
                if self.roles[token_id] == "eos" and self.texts.get(token_id) not in ends.written:
                    self.conflict(
                        "declared_never_written",
                        f"{self.name(token_id)} is declared as a stop; the chat template ends no turn with "
                        "it.",
                        token_id,
                        "warning" if none_written else "info",
                    )
        self._shape(ends, ids)

    def _undeclared(self, token_id: int) -> None:
        if self.facts.gguf:
            self.conflict(
                "gguf_misses_terminator",
                f"the chat template ends assistant turns with {self.name(token_id)}, which none of the "
                "metadata's eos, eot and eom keys holds: software that reads only them does not stop.",
                token_id,
            )
            return
        self.conflict(
            "undeclared_terminator",
            f"the chat template ends assistant turns with {self.name(token_id)}, which no file declares: add "
            "it to eos_token_id in generation_config.json, or software that reads only the files runs on.",
            token_id,
        )

    def _shape(self, ends: TemplateEnds, ids: dict[str, int]) -> None:
        """Conflicts in the template itself."""
        if ends.refusal is not None:
            self.conflict("template_refuses", f"no conversation could be rendered: {ends.refusal}")
        elif ends.sentinel_dropped:
            self.conflict(
                "sentinel_dropped", "the chat template does not write the last message of the assistant."
            )
        elif ends.closing_text is not None:
            self.conflict(
                "terminator_is_text",
                f"the chat template ends assistant turns with the text {ends.closing_text[:40]!r}, which is "
                "not one token; give it as a stop string.",
            )
        elif ends.next_header is not None:
            self.conflict(
                "terminator_is_next_header",
                f"the chat template writes nothing behind an assistant turn; {ends.next_header!r}, the "
                "first token of the next turn, ends it.",
                ids[ends.next_header],
            )
        elif not ends.turn_ends:
            self.conflict(
                "no_terminator",
                "the chat template writes no token at the end of an assistant turn, so a model tuned on it "
                "cannot learn to stop.",
            )
        if ends.history_closer is not None:
            token_id = ids[ends.history_closer]
            what = (
                f"{token_id} ({ends.history_closer}) closes assistant turns in the history and not the "
                "last one"
            )
            if token_id in self.roles:
                message = f"{what}, and yet it is declared as a stop."
                self.conflict("history_closer", message, token_id, "warning")
            else:
                self.conflict("history_closer", f"{what}, so it is no stop.", token_id)
        if ends.ignores_generation_prompt:
            self.conflict(
                "no_generation_prompt",
                "the chat template ignores add_generation_prompt: the prompt ends behind the user's turn, so "
                "the model goes on as the user.",
            )

    def check_files(self) -> None:
        facts = self.facts
        if facts.unknown_eos is not None:
            self.conflict(
                "unknown_eos_token",
                f"the tokenizer's eos_token {facts.unknown_eos!r} is not in its vocabulary.",
            )
        if facts.vocab_size is not None:
            for token_id in sorted(self.roles):
                if token_id >= facts.vocab_size:
                    self.conflict(
                        "outside_vocab",
                        f"{self.name(token_id)} is a stop, but the lm_head has only {facts.vocab_size} "
                        "rows, so it can never be sampled.",
                        token_id,
                    )
                    del self.roles[token_id]
        if facts.pad_id is not None and facts.pad_id in self.roles:
            self.conflict(
                "pad_in_stop_set",
                f"the padding token {self.name(facts.pad_id)} is a stop as well: training code that masks "
                "padding by id unlearns it.",
                facts.pad_id,
            )
        if facts.max_new_tokens is not None:
            self.conflict(
                "max_new_tokens_left_over",
                f"generation_config.json carries max_new_tokens {facts.max_new_tokens}: software that "
                "obeys it cuts answers there without a word.",
            )
        if not self.roles:
            self.conflict(
                "empty_stop_set", "no token ends a turn of this model: nothing but a limit stops it."
            )

    def stop_set(self) -> StopSet:
        stops = StopSet.of(self.roles, vocab_size=self.facts.vocab_size)
        return replace(
            stops,
            sources={token_id: tuple(dict.fromkeys(found)) for token_id, found in self.sources.items()},
            conflicts=tuple(self.conflicts),
            texts=dict(self.texts),
            terminator=self.terminator,
        )
