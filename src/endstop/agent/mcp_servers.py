"""Which MCP servers a run has, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from endstop.protocol.errors import EndstopError


class McpServer(BaseModel):
    """One server. `${NAME}` in args, env, url and headers stands for a variable of the environment.

    Attributes:
        command, args, env, cwd: a server that is started here and spoken to over stdio. It sees HOME, PATH
            and the like, and of all other variables only those in `env`.
        url, headers: a server that is there already, over streamable HTTP.
        timeout: seconds that a call may take. start_timeout: that opening it may take.
        tools: only these of its tools; all, where it is not given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = Field(default_factory=dict)
    timeout: Annotated[float, Field(gt=0)] = 60.0
    start_timeout: Annotated[float, Field(gt=0)] = 30.0
    tools: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one_transport(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("needs either command (stdio) or url (streamable HTTP)")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        return self


def read_servers(entries: Mapping[str, Any]) -> list[McpServer]:
    """Servers by name, as settings have them; `{"mcpServers": {...}}` as well, as other programs write it.

    Raises EndstopError that names the server and what is wrong with it.
    """
    inner = entries.get("mcpServers", entries)
    if not isinstance(inner, Mapping):
        raise EndstopError("mcpServers must be a mapping of names to servers.")
    servers = []
    for name, entry in inner.items():
        if not isinstance(entry, Mapping):
            raise EndstopError(f"MCP server {name}: a mapping with command or url, got {entry!r}.")
        # Other programs name the transport, which command and url already say.
        values = {key: value for key, value in entry.items() if key not in ("type", "transport")}
        try:
            servers.append(McpServer(name=name, **values))
        except (ValidationError, TypeError) as error:
            raise EndstopError(f"MCP server {name}: {_fault(error)}.") from None
    return servers


def _fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split()).rstrip(".")
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"])
    text = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        known = ", ".join(name for name in McpServer.model_fields if name != "name")
        return f"unknown key {place}; known are {known}"
    return f"{place}: {text}" if place else text
