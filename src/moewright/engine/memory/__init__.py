"""Memory: saved tensors, deferred weight gradients, and the allocator."""
