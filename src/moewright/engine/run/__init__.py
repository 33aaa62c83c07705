"""Running a job: launching ranks, training, verifying, and dry runs."""
