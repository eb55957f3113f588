"""The exception tree. An outcome is a value; an exception means misuse, or that a training cannot go on."""

from functools import partial
from typing import Any


class OomguardError(Exception):
    """Every error that oomguard raises on purpose.

    >>> import oomguard
    >>> try:
    ...     oomguard.Spec(cell="lstm", seq=0)
    ... except oomguard.OomguardError as error:
    ...     print(error)
    --seq must be a whole number from 1 to 1,000,000,000, but got 0. Give --seq a number in that range.
    """


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


class GuardError(OomguardError):
    """A training cannot go on: memory ran out, and there is nothing left to fall back to.

    >>> error = GuardError(rule="The last rung must fit", got="it did not", advice="Free memory.", figures={"rung": 3})
    >>> str(error), error.figures
    ('The last rung must fit, but it did not. Free memory.', {'rung': 3})
    """

    def __init__(self, *, rule: str, got: str, advice: str, figures: dict[str, Any] | None = None) -> None:
        super().__init__(f"{rule}, but {got}. {advice}")
        self.rule, self.got, self.advice, self.figures = rule, got, advice, figures or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), rule=self.rule, got=self.got, advice=self.advice, figures=self.figures), ()


class TornUpdateError(GuardError):
    """Memory ran out while weights were updated, and which of them are new cannot be told: go back to a checkpoint."""
