"""The command line: thin verbs that read options, call the floors below, and print the answer."""
