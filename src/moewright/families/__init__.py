"""Families of models, a record each: what its config.json says, and what its weights are called."""
