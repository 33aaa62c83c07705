"""Pipeline timetables: the layers of stages, the rows of schedules, and their messages."""
