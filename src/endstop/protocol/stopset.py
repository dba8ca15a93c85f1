"""The stop set: every token id that ends a turn, with its role and where it was declared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from endstop.outcomes import STOP_ROLES, StopRole


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stop id was declared: a file of the model and the key in it."""

    file: str
    key: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Something about the stop set that does not fit together. Data, not an error."""

    code: str
    message: str
    token_id: int | None = None
    severity: str = "warning"


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
        """A stop set from ids and roles: `StopSet.of({2: "eos", 7: "turn_end"})`, or ids that are all `eos`."""
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
