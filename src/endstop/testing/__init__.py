"""Models for tests, part of the package: whoever builds on endstop tests their stopping with them too."""

from endstop.testing.cycle import CycleModel, cycle_model
from endstop.testing.scripted import ScriptedModel, follow

__all__ = ["CycleModel", "ScriptedModel", "cycle_model", "follow"]
