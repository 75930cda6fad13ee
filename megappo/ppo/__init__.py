"""The mathematics of PPO on flat, ragged tensors: no configuration, collectives or logging."""
