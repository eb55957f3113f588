"""The command `oomguard`, also as `python -m oomguard`. It imports inside, so that Ctrl-C is quiet from the start."""

import sys

INTERRUPTED, BROKEN = 130, 70
"""Exit codes beside those of cli.py: 128 + SIGINT, and sysexits' EX_SOFTWARE for what should not happen."""


def main() -> None:
    """Run the command line; an error of oomguard's own never looks like an answer (0, 1) or like misuse (2)."""
    try:
        from oomguard.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception:
        import traceback

        traceback.print_exc()
        sys.exit(BROKEN)


if __name__ == "__main__":
    main()
