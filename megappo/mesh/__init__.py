"""One rank of the mesh: its roles, the tokens it is sent, experience, and optimizer steps."""
