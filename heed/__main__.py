"""Run the command line as `python -m heed`, without an installed command."""

from heed.cli import main

main()
