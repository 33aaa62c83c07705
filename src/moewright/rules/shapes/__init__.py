"""The parameters of a model, the shards that ranks hold of them, and the FLOPs they make."""
