"""Communication: process groups, collectives, and where tensors lie on the ranks."""
