"""The volumes of collectives: payload handed in and calls, by operation and group."""
