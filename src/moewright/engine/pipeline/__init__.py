"""The pipeline: the executor of the timetable, and the messages between ranks."""
