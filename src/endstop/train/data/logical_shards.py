"""Logical shards: the data order of a training does not depend on how many processes it runs on.

The documents are dealt to S shards, each of which packs its own rows; row k of a step is the next row of
shard k % S. A process of rank r in a world of W works for the shards r, r + W, ... So a step has the same
rows in any world whose size divides S, and the state of a shard can be taken over by another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from endstop.protocol.errors import EndstopError
from endstop.train.batch import TokenBatch
from endstop.train.data.mixture import Mixture, ShardReader

Row = TypeVar("Row")
RowOut = TypeVar("RowOut", covariant=True)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Who makes which row. Raises ValueError where the numbers do not go together.

    Attributes:
        shards: logical shards (S), a multiple of `world`.
        rows_per_step: rows of all processes in a step, a multiple of `shards`.
        micro_rows: rows of a micro-batch at most.
    """

    shards: int
    rows_per_step: int
    micro_rows: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        for name in ("shards", "rows_per_step", "micro_rows", "world"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be from 0 to {self.world - 1}, got {self.rank}")
        if self.shards % self.world:
            raise ValueError(
                f"{self.shards} data shards cannot be dealt to {self.world} processes; set data_shards "
                f"to a multiple of {self.world}, or run on a number of processes that divides {self.shards}"
            )
        if self.rows_per_step % self.shards:
            raise ValueError(
                f"{self.rows_per_step} rows per step cannot be dealt evenly to {self.shards} data shards"
            )

    @property
    def own_shards(self) -> list[int]:
        """The shards of this process."""
        return list(range(self.rank, self.shards, self.world))

    def micro_batches(self) -> list[list[int]]:
        """For each micro-batch of a step the shards its rows come from, in order."""
        rows = [row % self.shards for row in range(self.rows_per_step)]
        own = [shard for shard in rows if shard % self.world == self.rank]
        return [own[at : at + self.micro_rows] for at in range(0, len(own), self.micro_rows)]


class Shard(Protocol[RowOut]):
    """One logical shard: its rows, one after the other, and where it is among them."""

    reader: ShardReader

    def next_row(self) -> RowOut: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


class ShardedLoader(ABC, Generic[Row]):
    """Endless steps out of the rows of a process's shards.

    Attributes:
        mixture: what is read. plan: who makes which row.
    """

    def __init__(
        self, mixture: Mixture, plan: ShardPlan, shards: Mapping[int, Shard[Row]], facts: dict[str, Any]
    ) -> None:
        """facts: what a position in the data depends on; a position of others is refused."""
        self.mixture, self.plan = mixture, plan
        self._rows_of, self._facts = shards, {**facts, "shards": plan.shards, "documents": len(mixture)}

    @property
    def own_shards(self) -> list[int]:
        """The shards of this process."""
        return self.plan.own_shards

    def next_step(self) -> list[TokenBatch]:
        """This process's micro-batches of the next optimiser step, each [<= micro_rows, row_length]."""
        return [
            self._batch([self._rows_of[shard].next_row() for shard in shards])
            for shards in self.plan.micro_batches()
        ]

    def state(self, shard: int) -> dict[str, Any]:
        """The position of a shard, for `json.dumps`: what comes after it is the same in whatever process."""
        return {**self._facts, **self._rows_of[shard].state()}

    def load_state(self, shard: int, state: dict[str, Any]) -> None:
        """Go on where a state was taken. Raises EndstopError for a state of other data or settings."""
        for name, value in self._facts.items():
            before = state.get(name)
            if before != value:
                raise EndstopError(
                    f"the saved position in the data belongs to {name} {before!r}, this run has {value!r}: "
                    "resume with the settings and the data of the first run, or start a new one."
                )
        self._rows_of[shard].load_state(state)

    @property
    def epochs(self) -> float:
        """How often the mixture has been gone through, as far as this process's shards tell."""
        taken = sum(shard.reader.position for shard in self._rows_of.values())
        return taken * self.plan.world / len(self.mixture)

    @abstractmethod
    def _batch(self, rows: list[Row]) -> TokenBatch: ...
