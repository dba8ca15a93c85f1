"""The stop set: every token id that ends a turn, with its role and where it was declared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from endstop.outcomes import STOP_ROLES, StopRole

Severity = Literal["info", "warning", "error"]
CONFLICTS: dict[str, Severity] = {
    "undeclared_terminator": "error",
    "gguf_misses_terminator": "error",
    "undeclared_tool_end": "warning",
    "declared_never_written": "info",
    "outside_vocab": "error",
    "pad_in_stop_set": "warning",
    "unknown_eos_token": "error",
    "no_terminator": "error",
    "terminator_is_text": "error",
    "terminator_is_next_header": "info",
    "history_closer": "info",
    "sentinel_dropped": "error",
    "template_refuses": "error",
    "no_generation_prompt": "error",
    "max_new_tokens_left_over": "warning",
    "empty_stop_set": "error",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stop id was declared: a file of the model and the key in it."""

    file: str
    key: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Something about the stop set that does not fit together. Data, not an error.

    Attributes:
        code: one of CONFLICTS, stable.
        message: one sentence for a person.
        token_id: the id in question, where there is one.
        severity: `info` (common in healthy models), `warning` or `error` (the model will not stop,
            or stops wrongly, in software that reads only the files).
    """

    code: str
    message: str
    token_id: int | None = None
    severity: Severity = "warning"


@dataclass(frozen=True)
class StopSet:
    """Ids that end a turn.

    Attributes:
        roles: id -> `eos`, `turn_end` or `tool_end`.
        sources: id -> all the places that declare it.
        conflicts: what does not fit together, as data.
        texts: id -> the token's text, where known.
        terminator: the id that the chat template writes at the end of an assistant turn, if any.
        vocab_size: rows of the lm_head, where known; ids at or beyond it cannot be sampled.
    """

    roles: Mapping[int, StopRole]
    sources: Mapping[int, tuple[Source, ...]] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    texts: Mapping[int, str] = field(default_factory=dict)
    terminator: int | None = None
    vocab_size: int | None = None

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self.roles)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.roles

    def __len__(self) -> int:
        return len(self.roles)

    @classmethod
    def of(cls, roles: Mapping[int, StopRole] | Iterable[int], *, vocab_size: int | None = None) -> StopSet:
        """A stop set from ids and roles, `StopSet.of({2: "eos", 7: "turn_end"})`, or from ids, all `eos`."""
        given: dict[int, StopRole] = (
            dict(roles) if isinstance(roles, Mapping) else dict.fromkeys(roles, "eos")
        )
        for token_id, role in given.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ValueError(f"a stop set holds token ids of 0 or more, got {token_id!r}")
            if role not in STOP_ROLES:
                raise ValueError(f"the role of a stop id is one of {', '.join(STOP_ROLES)}, got {role!r}")
        source = (Source("StopSet.of", "argument"),)
        return cls(given, dict.fromkeys(given, source), vocab_size=vocab_size)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        offline: bool | None = None,
        chat_template: str | None = None,
    ) -> StopSet:
        """The stop set of a model: a directory, a .gguf file, a Hub id or a registry name.

        It is the union of what the files declare and of what the chat template really writes at the
        end of an assistant turn, which is found by rendering, never by a list of token names.

        Args:
            revision: branch, tag or commit, for a model that is fetched.
            offline: True fetches nothing; None follows HF_HUB_OFFLINE and ENDSTOP_OFFLINE.
            chat_template: a Jinja template to be used in place of the model's own.

        Raises ModelNotFound, and BrokenModel for files that cannot be read.
        """
        from endstop.protocol.declared import facts_of_directory, facts_of_gguf
        from endstop.protocol.model_files import ChatTemplate
        from endstop.protocol.resolve import resolve_model
        from endstop.protocol.stopset_build import stop_set_of

        model = resolve_model(path, revision=revision, offline=offline, weights=False)
        facts = facts_of_gguf(model.path) if model.kind == "gguf" else facts_of_directory(model.path)
        if chat_template is not None:
            facts.templates = {"default": ChatTemplate(chat_template, "argument", "chat_template")}
        return stop_set_of(facts)
