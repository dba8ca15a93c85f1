"""`python -m endstop` is the command `endstop`."""

from endstop.cli import main

main()
