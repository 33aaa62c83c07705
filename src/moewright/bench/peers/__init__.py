"""What `bench peers` runs: one process for each contestant, in turns, on the same model and
tokens."""
