"""`python -m gluon_mgpu train …` is `gluon-mgpu train …`."""

import sys


def main():
    if sys.argv[1:2] == ["doctor"]:  # without the other commands, which cannot be imported where NumPy is broken
        from gluon_mgpu.doctor import doctor

        doctor(sys.argv[2:], prog_name="gluon-mgpu doctor")
    else:
        try:
            from gluon_mgpu import cli
        except ImportError as error:  # NumPy 2 needs libstdc++ itself, and says so in a page
            from gluon_mgpu import engine

            line = engine.missing_libraries(str(error))
            if line is None:
                raise
            sys.exit(f"error: {line}")
        cli.main(prog_name="gluon-mgpu")


if __name__ == "__main__":
    main()
