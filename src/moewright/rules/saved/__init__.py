"""What a layer saves for backward, what recompute frees, and what is sent to the host."""
