"""PPO on two-digit addition: a whole run on two CPU cores in minutes."""
