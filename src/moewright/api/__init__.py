"""What the verbs of the command line and the Python face do; `api.face` has the latter's names."""
