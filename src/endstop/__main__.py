"""`python -m endstop` is the command `endstop`; `torchrun -m endstop` starts it in several processes."""

from endstop.cli import main

main()
