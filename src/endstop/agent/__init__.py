"""Agents whose "done" is proven: tools, a loop, and a gate that runs the project's own checks."""
