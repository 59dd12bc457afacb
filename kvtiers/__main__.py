"""``python -m kvtiers``: the command line."""

from kvtiers.connector.commands.cli import main

if __name__ == "__main__":
    main()
