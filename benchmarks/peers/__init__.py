"""The engine in turns with other MoE trainers, each in a process of its own, on the same tokens."""
