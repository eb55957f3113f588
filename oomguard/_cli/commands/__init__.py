"""The subcommands of `oomguard`. Each imports the code that it needs, so that the others start fast."""

# in the order of the help
from oomguard._cli.commands import measure, plan, train, run, export, show, fleet, house  # noqa: F401, I001
from oomguard._cli.program import app

__all__ = ["app"]
