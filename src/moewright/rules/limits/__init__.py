"""Which jobs are legal, and which of them the engine and other trainers run."""
