"""The memory of pipeline ranks: model states, activations, buffers, and their peak."""
