"""Floor 0: the nouns. Frozen records and nothing else; standard library only."""
