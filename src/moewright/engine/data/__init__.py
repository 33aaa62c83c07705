"""Text to tokens to samples: tokenizer, Megatron's .bin/.idx files, and the sampler.

Nothing here needs torch or knows the layout.
"""
