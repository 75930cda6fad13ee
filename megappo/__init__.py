"""PPO-RLHF for very large language models on a Megatron 3D mesh."""
