"""`python -m acclimate`: the same as the command `acclimate`."""

from acclimate.cli.main import run

if __name__ == "__main__":
    run()
