"""Unit tests of megappo.rewards."""
