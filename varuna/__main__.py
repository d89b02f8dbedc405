"""``python -m varuna``: the ``varuna`` command of this interpreter."""

from varuna.cli import main

main(prog_name="varuna")
