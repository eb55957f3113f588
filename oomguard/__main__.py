"""`python -m oomguard`: the same as the command `oomguard`."""

from oomguard.cli import main

if __name__ == "__main__":
    main()
