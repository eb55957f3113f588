"""The exception tree. An outcome is a value; an exception means misuse."""

from functools import partial
from typing import Any


class OomguardError(Exception):
    """Every error that oomguard raises on purpose."""


class MisuseError(OomguardError, ValueError):
    """Something was asked that cannot be answered: the rule, what was got, what to do.

    >>> str(MisuseError(rule="--hidden must be at least 1", got="got 0", advice="Give a size such as 128."))
    '--hidden must be at least 1, but got 0. Give a size such as 128.'
    """

    def __init__(self, *, rule: str, got: str, advice: str) -> None:
        super().__init__(f"{rule}, but {got}. {advice}")
        self.rule, self.got, self.advice = rule, got, advice

    def __reduce__(self) -> tuple[Any, ...]:
        # an exception is pickled as type(*args), which keyword-only arguments would break on its way out of a child
        return partial(type(self), rule=self.rule, got=self.got, advice=self.advice), ()
