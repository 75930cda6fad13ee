"""Checkpoints: sharded model and optimizer state, the run's position, whole or not at all."""
