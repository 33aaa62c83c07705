"""`python -m benchmarks.gpu`: what one GPU does with the engine, as a page of docs/gpu."""
