"""PPO on SmolLM2-135M-Instruct, a real language model, with a reward that can be checked."""
