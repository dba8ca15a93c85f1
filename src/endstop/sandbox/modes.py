"""Which sandbox this machine gives, and how weak it is."""

from __future__ import annotations

import functools
import os
from typing import Literal

from endstop.protocol.errors import EndstopError
from endstop.sandbox.bubblewrap import probe
from endstop.sandbox.settings import SandboxMode, SandboxSettings
from endstop.sandbox.supervised import namespaces_available

GivenMode = Literal["bubblewrap", "namespaces", "process"]
_HELP = {
    "bubblewrap": "install bubblewrap 0.8 or newer and allow user namespaces",
    "namespaces": "allow user namespaces",
}


def given_mode(settings: SandboxSettings) -> tuple[GivenMode, str]:
    """The mode that commands run in, and why it is not a stronger one ("" for the strongest).

    Raises EndstopError where the mode that was asked for cannot be had.
    """
    if os.name != "posix":
        raise EndstopError("commands of an agent are run only on Linux and macOS")
    if settings.mode == "process":
        return "process", "chosen"
    if settings.mode == "namespaces":
        if not _namespaces():
            raise _cannot("namespaces", "the kernel gives this user no namespaces")
        return "namespaces", "chosen"
    probed = probe()
    if probed.available:
        return "bubblewrap", ""
    if settings.mode == "bubblewrap":
        raise _cannot("bubblewrap", probed.reason)
    if _namespaces():
        return "namespaces", probed.reason
    return "process", f"{probed.reason}, and the kernel gives this user no namespaces"


def drops_user(settings: SandboxSettings) -> bool:
    """Whether commands run as another user than this one, so that they need files of their own."""
    return os.name == "posix" and os.geteuid() == 0 and given_mode(settings)[0] == "bubblewrap"


def describe(settings: SandboxSettings) -> str:
    """One line for people and for the record: the mode, what it holds, why it is not a stronger one."""
    mode, why = given_mode(settings)
    network = "the host's network" if settings.network else "no network"
    if mode == "bubblewrap":
        user = f", as user {settings.uid}" if drops_user(settings) else ""
        return f"bubblewrap: {network}, no files or processes of the host, limits{user}"
    if mode == "namespaces":
        held = f"{network}, no processes of the host, limits"
        return f"namespaces (weaker, {why}): {held}; all files of this user are open"
    return f"process (weakest, {why}): limits only; the network and all files of this user are open"


def _cannot(mode: SandboxMode, reason: str) -> EndstopError:
    return EndstopError(
        f"the sandbox mode {mode} cannot be had on this machine: {reason}; {_HELP[mode]}, or choose auto"
    )


@functools.cache
def _namespaces() -> bool:
    return namespaces_available()
