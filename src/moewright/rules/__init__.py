"""Floor 1: what is true of every job whatever plans or runs it, shared by planner and engine."""
