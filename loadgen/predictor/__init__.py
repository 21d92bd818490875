"""Length prediction offline: record what a model answers, train the ranker on it, say how well it ranks."""
