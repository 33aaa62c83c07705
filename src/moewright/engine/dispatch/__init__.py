"""Token dispatch: the seam of six steps, and the dispatchers behind it."""
