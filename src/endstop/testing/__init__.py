"""Models for tests, part of the package: whoever builds on endstop tests their stopping with them too."""

from endstop.testing.cycle import CycleModel, cycle_model
from endstop.testing.scripted import ScriptedModel, follow
from endstop.testing.scripted_chat import ChatCall, Reply, ScriptedChat

__all__ = ["ChatCall", "CycleModel", "Reply", "ScriptedChat", "ScriptedModel", "cycle_model", "follow"]
