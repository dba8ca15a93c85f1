"""Logical shards: the data order of a training does not depend on how many processes it runs on.

The documents are dealt to S shards, each of which packs its own rows; row k of a step is the next row of
shard k % S. A process of rank r in a world of W works for the shards r, r + W, ... So a step has the same
rows in any world whose size divides S, and the state of a shard can be taken over by another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from endstop.protocol.errors import EndstopError


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


def check_same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises EndstopError where a saved position belongs to data that was dealt or packed differently."""
    for name, value in now.items():
        before = saved.get(name)
        if before != value:
            raise EndstopError(
                f"the saved position in the data belongs to {name} {before!r}, this run has {value!r}: "
                "resume with the settings and the data of the first run, or start a new one."
            )
