"""`python -m heed`, which needs no installed command."""

from heed.cli import main

main()
