"""What an agent without a submit tool writes into a file: evidence, a way out, a question."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from endstop.agent.task import Task

SIZE_LIMIT = 64 << 10


class GiveUpRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: str = ""
    evidence: str = ""
    hard: bool = False


class Request(BaseModel):
    """The file's content. Without `give_up` or `ask_user` a stop says that the task is done."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    summary: str = ""
    checklist: dict[str, str] = {}
    assumptions: tuple[str, ...] = ()
    give_up: GiveUpRequest | None = None
    ask_user: str | None = None

    @property
    def way_out(self) -> str:
        """The give_up or the question, as a key; empty where there is none."""
        asked = self.give_up.model_dump() if self.give_up else self.ask_user
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16] if asked else ""


def read_request(path: Path) -> tuple[Request, str]:
    """The request in a file, empty where there is none, and what is wrong with the file, for the agent.

    The agent owns the file: a link, a device, or more than 64 KiB is not read.
    """
    try:
        data = read_regular(path, SIZE_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        return Request(), ""
    except OSError as error:
        return Request(), f"{path.name} is not used: {error.strerror or error}."
    try:
        return Request.model_validate_json(data), ""
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return Request(), f"{path.name} is not used: {where + ': ' if where else ''}{first['msg']}."


def read_regular(path: Path, limit: int) -> bytes:
    """A file that somebody else may have put there: no link, no device, no more than `limit` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes")
    return data


def how_to_ask(task: Task, place: str) -> str:
    """The file, for the agent: what may stand in it."""
    checklist = {item.id: "tests/test_x.py::test_y, or a path" for item in task.checklist}
    done = {"summary": "...", "checklist": checklist} if checklist else {"summary": "..."}
    stuck = {"give_up": {"reason": "...", "evidence": "what was observed", "hard": False}}
    return (
        f"Here, to stop is to submit. What goes with it stands in {place}, as JSON: {json.dumps(done)} "
        f"If the task cannot be done: {json.dumps(stuck)} A question: {json.dumps({'ask_user': '...'})} "
        "Take give_up and ask_user out again when they no longer hold."
    )
