"""The command `oomguard`, also `python -m oomguard`. `main` imports the rest, so that Ctrl-C is always quiet."""

import sys

INTERRUPTED, BROKEN = 130, 70
"""Exit codes that must work before anything is imported: 128 + SIGINT, and EX_SOFTWARE of sysexits.h.

`EXIT_CODES` of _cli/program.py has the meaning of all.
"""


def main() -> None:
    """Run the command line. An internal error has an exit code of its own, unlike a result (0, 1) and misuse (2)."""
    try:
        from oomguard._cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception:
        import traceback

        traceback.print_exc()
        sys.exit(BROKEN)


if __name__ == "__main__":
    main()
