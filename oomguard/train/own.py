"""A model of the user's own: built by a function that is kept by its name, so that a run can be taken up and used."""

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

from oomguard.checks import shown
from oomguard.errors import MisuseError
from oomguard.model import Recurrent
from oomguard.spec import Spec

Model = Callable[..., Any] | str | None
"""A function from a spec to a model, also by its name; None: the model that the spec describes."""


def name_of(model: Model) -> str | None:
    """The name package.module:function, under which a run remembers what built its model.

    >>> name_of(attrgetter), name_of(lambda spec: spec).partition(":")[2], name_of(None)
    ('operator:attrgetter', '<lambda>', None)
    """
    if model is None or isinstance(model, str):
        return model
    return f"{getattr(model, '__module__', '')}:{getattr(model, '__qualname__', shown(model))}"


def build_own(model: Callable[..., Any] | str, spec: Spec) -> Recurrent:
    """What the function builds, if it is what a plan's figures, segments and checkpoints are for."""
    own = (_imported(model) if isinstance(model, str) else model)(spec)
    if not isinstance(own, Recurrent) or own.spec != spec:
        raise MisuseError(
            rule="A model of your own must be an oomguard.model.Recurrent with the plan's spec: the plan's figures, "
            "segments and checkpoints are for that",
            got=f"{shown(model)} gave {type(own).__name__}",
            advice="Change what it builds, or train any other module in a loop of your own with oomguard.guard.",
        )
    return own


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = attrgetter(function)(import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise MisuseError(
            rule="A model of your own is a function, named as package.module:function",
            got=f"{name!r} cannot be imported ({error})",
            advice="Check the name, and that the package is found, or give the function itself, in Python as model=.",
        ) from None
    return found
