"""`python -m gluon_mgpu train …` is `gluon-mgpu train …`."""

from gluon_mgpu.cli import main

main(prog_name="gluon-mgpu")
