"""The signatures that `help()`, completion and type checkers show: they name what the structs have."""

import inspect
import types
from typing import Any, Literal, Union, get_args, get_origin

import pytest

import oomguard
from oomguard._api import arguments
from oomguard._core.errors import REQUIRED, fields_of
from oomguard._data.options import CUTTING, DataOptions
from oomguard._train import TrainOptions

NAMES = ("estimate", "probe", "find_feasible_config", "sampler", "tradeoffs", "curves", "train", "resume", "predict")
STRUCTS: dict[type[Any], list[type[Any]]] = {
    arguments.SpecFields: [oomguard.Spec],
    arguments.Knobs: [oomguard.Candidate],
    arguments.DataFields: [DataOptions],
    arguments.TrainFields: [DataOptions, TrainOptions],
}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return {**inspect.signature(getattr(oomguard, name)).parameters}


@pytest.mark.parametrize("names", STRUCTS, ids=lambda names: names.__name__)
def test_what_type_checkers_read_has_every_field_of_the_structs(names: type[Any]) -> None:
    assert {*names.__annotations__} == {name for struct in STRUCTS[names] for name in struct.__struct_fields__}


def test_the_options_that_cut_are_those_of_the_data() -> None:
    assert {*arguments.Cutting.__annotations__} == {*CUTTING}


@pytest.mark.parametrize("names", STRUCTS, ids=lambda names: names.__name__)
def test_what_type_checkers_read_takes_the_values_of_the_structs(names: type[Any]) -> None:
    for struct in STRUCTS[names]:
        fields: dict[str, Any] = {**fields_of(struct)}  # type: ignore[arg-type]
        for name, field in fields.items():
            kinds = set(flat(names.__annotations__[name]))
            wanted: set[Any] = {*field.choices} or {field.kind}
            if field.kind is tuple:
                wanted = {str}  # a sequence of names
            elif field.choices and str in kinds:
                wanted = {str}
            assert wanted <= kinds, name
            assert not field.optional or type(None) in kinds, name


def flat(kind: Any) -> list[Any]:
    """The types of an annotation, with the values of Literals, and without the frames around them."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    if get_origin(kind) in (Union, types.UnionType):
        return [part for one in get_args(kind) for part in flat(one)]
    inner = [part for one in get_args(kind) if one is not ... for part in flat(one)]
    return [get_origin(kind) or kind, *inner]


@pytest.mark.parametrize("name", NAMES)
def test_a_signature_has_names_and_no_catch_all(name: str) -> None:
    shown = parameters(name)
    assert not [one for one in shown.values() if one.kind is one.VAR_KEYWORD]
    assert len(shown) > 20


def test_a_signature_has_the_defaults_of_the_structs() -> None:
    shown = parameters("estimate")
    for struct in (oomguard.Spec, oomguard.Candidate):
        for name, field in fields_of(struct).items():
            assert shown[name].default == (None if field.default is REQUIRED else field.default)


def test_knobs_of_a_search_have_no_default_since_it_chooses_them() -> None:
    shown = parameters("find_feasible_config")
    assert {shown[name].default for name in oomguard.Candidate.__struct_fields__} == {None}
    assert {"budget", "data", "target", "stride", "hidden", "progress"} <= {*shown}


@pytest.mark.parametrize(
    ("name", "call"),
    [("probe", arguments.ProbeCall), ("find_feasible_config", arguments.PlanCall), ("train", arguments.TrainCall)],
)
def test_an_overload_takes_what_the_function_takes(name: str, call: type[Any]) -> None:
    by_position = {"spec", "candidate", "plan", "data", "model"} - {*call.__annotations__}
    of_a_task = {"steps"} - {*call.__annotations__}
    assert {*parameters(name)} - by_position - of_a_task == {*call.__annotations__}


def test_an_unknown_name_is_still_answered_with_advice() -> None:
    with pytest.raises(oomguard.MisuseError, match="Did you mean 'hidden'"):
        oomguard.find_feasible_config(cell="lstm", seq=10, hiden=5, device="t4")  # type: ignore[call-overload]
