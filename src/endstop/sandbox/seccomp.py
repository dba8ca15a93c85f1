"""A filter of system calls that keeps commands off the first process of their PID namespace.

That process is bubblewrap's own and runs as the same user. It is what ends when whoever started the command
is gone, even killed; a command that could trace it could make it stay. Everything else may be traced.
"""

from __future__ import annotations

import errno
import platform
import struct

# For each machine, its kernel's interfaces: audit number -> {call: offset of the argument that is a pid}.
_SECOND, _FIRST = 16 + 8, 16
_CALLS = {
    "x86_64": {
        # ptrace and process_vm_writev, then the same of x32.
        0xC000003E: {101: _SECOND, 311: _FIRST, 0x40000209: _SECOND, 0x4000021C: _FIRST},
        0x40000003: {26: _SECOND, 348: _FIRST},
    },
    "aarch64": {
        0xC00000B7: {117: _SECOND, 271: _FIRST},
        0x40000028: {26: _SECOND, 377: _FIRST},
    },
}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _ARCHITECTURE = 0, 4


def filter_program(machine: str | None = None) -> bytes:
    """For bubblewrap's --seccomp; empty for machines whose calls are not known here."""
    program = [_step(_LOAD, _ARCHITECTURE)]
    interfaces = _CALLS.get(machine or platform.machine(), {})
    for architecture, calls in interfaces.items():
        block = [_step(_LOAD, _NUMBER)]
        for call, argument in calls.items():
            block += [
                _step(_EQUAL, call, otherwise=4),
                _step(_LOAD, argument),
                _step(_EQUAL, 1, otherwise=1),
                _step(_RETURN, _REFUSE),
                _step(_RETURN, _ALLOW),
            ]
        block.append(_step(_RETURN, _ALLOW))
        program += [_step(_EQUAL, architecture, otherwise=len(block)), *block]
    return b"".join([*program, _step(_RETURN, _ALLOW)]) if interfaces else b""


def _step(code: int, value: int, *, otherwise: int = 0) -> bytes:
    """One instruction; `otherwise`: how many are skipped where it does not hold."""
    return struct.pack("=HBBI", code, 0, otherwise, value)
