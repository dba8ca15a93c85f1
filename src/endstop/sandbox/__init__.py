"""Running untrusted code with limits."""

from endstop.sandbox.bounded import BoundedOutput
from endstop.sandbox.command import CommandResult, run_command
from endstop.sandbox.modes import describe, drops_user, given_mode
from endstop.sandbox.process import Finished, Limits, run_python
from endstop.sandbox.settings import CommandLimits, SandboxMode, SandboxSettings

__all__ = [
    "BoundedOutput",
    "CommandLimits",
    "CommandResult",
    "Finished",
    "Limits",
    "SandboxMode",
    "SandboxSettings",
    "describe",
    "drops_user",
    "given_mode",
    "run_command",
    "run_python",
]
