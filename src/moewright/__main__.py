"""`python -m moewright`: the command line."""

from moewright.cli.main import run

if __name__ == "__main__":
    run()
