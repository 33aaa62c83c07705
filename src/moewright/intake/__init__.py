"""Floor 2: what people write, read strictly: models, hardware, job files, launch scripts."""
