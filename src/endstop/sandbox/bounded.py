"""Output of any length in bounded memory."""

from __future__ import annotations


class BoundedOutput:
    """The beginning and the end of a stream of bytes, whatever its length."""

    def __init__(self, limit_bytes: int) -> None:
        self._first, self._last = limit_bytes - limit_bytes // 2, limit_bytes // 2
        self._head, self._tail = bytearray(), bytearray()
        self._omitted = 0

    def add(self, chunk: bytes) -> None:
        room = self._first - len(self._head)
        self._head += chunk[: max(room, 0)]
        self._tail += chunk[room:] if room > 0 else chunk
        over = len(self._tail) - self._last
        if over > 0:
            del self._tail[:over]
            self._omitted += over

    def text(self) -> tuple[str, int]:
        """What was kept, with a line in the place of what was not, and the number of bytes left out."""
        head, tail = self._head.decode("utf-8", "replace"), self._tail.decode("utf-8", "replace")
        if not self._omitted:
            return (self._head + self._tail).decode("utf-8", "replace"), 0
        return f"{head}\n[{self._omitted} bytes left out]\n{tail}", self._omitted
