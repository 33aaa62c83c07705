"""Token dispatch: the interface of six steps, and the dispatchers behind it."""
