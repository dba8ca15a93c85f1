"""Running untrusted code with limits."""

from endstop.sandbox.process import Finished, Limits, run_python

__all__ = ["Finished", "Limits", "run_python"]
