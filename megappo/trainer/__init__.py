"""The PPO trainer and what puts a run together."""

from megappo.trainer.ppo_trainer import PPOTrainer

__all__ = ["PPOTrainer"]
