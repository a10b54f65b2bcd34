"""Evaluators: parameters in, numbers out; each owns its data."""
