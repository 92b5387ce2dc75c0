"""`python -m cas_cli`: the command without its console script."""

from cas_cli.main import main

main()
