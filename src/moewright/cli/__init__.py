"""Top floor: thin verbs that read input, join the floors below, and say what came out."""
