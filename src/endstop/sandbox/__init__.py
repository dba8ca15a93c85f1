"""Running untrusted code with limits."""

from endstop.sandbox.bounded import BoundedOutput
from endstop.sandbox.command import CommandResult, run_command
from endstop.sandbox.files import Entry, PathMissing, PathRefused, WorkspaceFiles
from endstop.sandbox.modes import describe, drops_user, given_mode
from endstop.sandbox.process import Finished, Limits, run_python
from endstop.sandbox.settings import CommandLimits, SandboxMode, SandboxSettings
from endstop.sandbox.workspace import WorkingCopy, give_to_sandbox

__all__ = [
    "BoundedOutput",
    "CommandLimits",
    "CommandResult",
    "Entry",
    "Finished",
    "Limits",
    "PathMissing",
    "PathRefused",
    "SandboxMode",
    "SandboxSettings",
    "WorkingCopy",
    "WorkspaceFiles",
    "describe",
    "drops_user",
    "give_to_sandbox",
    "given_mode",
    "run_command",
    "run_python",
]
