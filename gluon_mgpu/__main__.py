"""`python -m gluon_mgpu train …` is `gluon-mgpu train …`."""

import sys


def main():
    if sys.argv[1:2] == ["doctor"]:  # without the other commands, which cannot be imported where NumPy is broken
        from gluon_mgpu.doctor import doctor

        doctor(sys.argv[2:], prog_name="gluon-mgpu doctor")
    else:
        from gluon_mgpu import cli

        cli.main(prog_name="gluon-mgpu")


if __name__ == "__main__":
    main()
