"""Where scores come from: the protocol and the user's Python function."""
