"""`python -m endstop.cli` is the command `endstop`."""

from endstop.cli import main

main()
