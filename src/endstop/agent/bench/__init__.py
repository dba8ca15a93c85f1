"""Scripted runs that try a gate: dishonest ones that it must not accept, honest ones that it must."""
