"""The native backend: endstop's own fast forward pass."""

from endstop.runtime.native.model import NativeModel

__all__ = ["NativeModel"]
