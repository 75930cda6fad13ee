"""Runnable examples: each folder holds a configuration, a reward function and its README."""
