"""Tokens and text, without tensors: what the end is for a model, and the machine that notices it."""
