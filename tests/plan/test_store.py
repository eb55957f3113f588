"""The plan's file: written whole, read strictly, and checked against itself and against the device at hand."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from plan.making import EVERY, bucketed, lossy, measured, reckoned
from plan.searched import PROBLEMS, searched
from plans import plan_of
from strategies import attempt, has_three_beats

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._core.system import MAX_FILE_BYTES
from oomguard._core.units import GIB, MIB
from oomguard._plan import store
from oomguard._plan.find import AIMS
from oomguard._plan.store import check_device, decode_plan, load_plan, save_plan
from oomguard._plan.value import Aim, Allowed, Ended, Plan
from oomguard._report.plan import ENDED
from oomguard._spec.candidate import ALLOWED

every = pytest.mark.parametrize("kind", [*EVERY])
Edit = Callable[[dict[str, Any]], object]
SCHEMA = msgspec.json.schema(Plan)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def refused(content: bytes) -> MisuseError:
    """Why a file is no plan."""
    error = attempt(lambda: decode_plan(content, "x.json") and None)
    assert isinstance(error, MisuseError)
    assert has_three_beats(error)
    return error


def edited(edit: Edit, plan: Plan | None = None) -> bytes:
    """The file of a plan, changed by hand."""
    content = json.loads(msgspec.json.encode(plan or measured()))
    edit(content)
    return json.dumps(content).encode()


# there and back


@every
def test_what_is_saved_is_loaded_as_it_was(kind: str, path: Path) -> None:
    plan = EVERY[kind]()
    assert save_plan(plan, path) == path
    assert load_plan(path) == plan


@pytest.mark.parametrize("name", [*PROBLEMS])
def test_what_a_search_found_is_loaded_as_it_was(name: str, path: Path) -> None:
    plan = searched(name)[2]
    save_plan(plan, path)
    assert load_plan(path) == plan


def test_the_file_is_for_people_too(path: Path) -> None:
    save_plan(measured(), path)
    text = path.read_text()
    assert text.startswith('{\n  "version": 1,\n  "spec": {\n')
    assert text.endswith("}\n")


def test_directories_are_made(tmp_path: Path) -> None:
    save_plan(reckoned(), tmp_path / "a/b/plan.json")
    assert load_plan(tmp_path / "a/b/plan.json") == reckoned()


def test_a_plan_as_a_dictionary_is_what_the_file_has(path: Path) -> None:
    save_plan(measured(), path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(measured().to_dict()))


# the schema


def test_the_schema_that_is_shipped_is_current() -> None:
    """If it is not, write the text on the right to the file."""
    shipped = Path(store.__file__).with_name("schema.json").read_text()
    assert shipped == json.dumps(SCHEMA, indent=1, sort_keys=True) + "\n"


def faults(value: Any, rule: dict[str, Any], whole: dict[str, Any], path: str = "$") -> Iterator[str]:
    """Where a value does not satisfy a JSON Schema: as much of it as a plan's needs."""
    if "$ref" in rule:
        rule = whole["$defs"][rule["$ref"].rpartition("/")[2]]
    if "anyOf" in rule:
        if all(any(True for _ in faults(value, each, whole, path)) for each in rule["anyOf"]):
            yield f"{path}: none of several"
        return
    known: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    known |= {"integer": int, "number": int | float}
    if "type" in rule and not isinstance(value, known[rule["type"]]):
        yield f"{path}: no {rule['type']}"
        return
    if "enum" in rule and value not in rule["enum"]:
        yield f"{path}: {value} is not one of {rule['enum']}"
    if isinstance(value, dict):
        own = rule.get("properties", {})
        yield from (f"{path}: {name} is missing" for name in {*rule.get("required", [])} - {*value})
        other = rule.get("additionalProperties", True)
        if other is False:
            yield from (f"{path}: {name} is unknown" for name in {*value} - {*own})
        for name, item in value.items():
            yield from faults(item, own.get(name, other if isinstance(other, dict) else {}), whole, f"{path}.{name}")
    if isinstance(value, list):
        first = rule.get("prefixItems", [])
        rest = rule.get("items", {})
        for target, element in enumerate(value):
            below = first[target] if target < len(first) else rest if isinstance(rest, dict) else {}
            yield from faults(element, below, whole, f"{path}[{target}]")


@every
def test_a_plan_satisfies_the_schema(kind: str) -> None:
    content = json.loads(msgspec.json.encode(EVERY[kind]()))
    assert [*faults(content, SCHEMA, SCHEMA)] == []


@pytest.mark.parametrize("edit", [lambda d: d.pop("spec"), lambda d: d.update(more=1), lambda d: d.update(probes="2")])
def test_the_schema_refuses_what_is_no_plan(edit: Edit) -> None:
    assert [*faults(json.loads(edited(edit)), SCHEMA, SCHEMA)] != []


# what is no plan


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"null", b'"plan"', b"\xff\xfe", b"[" * 100_000, b"{}", b"version: 1", b'{"version": 1'],
    ids=lambda content: repr(content[:12]),
)
def test_what_is_not_an_object_in_json_is_refused(content: bytes) -> None:
    assert "x.json is not one" in refused(content).got


@pytest.mark.parametrize("version", [0, 2, "1", None, [], 1.5])
def test_another_version_is_refused_by_its_number(version: object) -> None:
    error = refused(edited(lambda d: d.update(version=version, unheard_of=1)))
    assert "reads plans of version 1" in error.rule
    assert f"has version {version}" in error.got


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("candidate"), "missing required field `candidate`"),
        (lambda d: d["candidate"].pop("microbatch"), "`microbatch` - at `$.candidate`"),
        (lambda d: d.update(more=1), "unknown field `more`"),
        (lambda d: d["fallbacks"][1].update(more=1), "unknown field `more` - at `$.fallbacks[1]`"),
        (lambda d: d.update(budget_bytes="8GiB"), "Expected `int`, got `str` - at `$.budget_bytes`"),
        (lambda d: d.update(budget_bytes=1.5), "at `$.budget_bytes`"),
        (lambda d: d["spec"].update(cell="transformer"), "'transformer' - at `$.spec.cell`"),
        (lambda d: d["candidate"].update(segments=0), "--segments must be a whole number"),
        (lambda d: d["records"][0].update(verdict="FINE"), "at `$.records[0].verdict`"),
        (lambda d: d["records"][1].update(peak_bytes=None), "A record of FITS has a peak"),
        (lambda d: d.update(fallbacks=None), "at `$.fallbacks`"),
        (lambda d: d.update(maximize=[]), "length >= 1 - at `$.maximize`"),
        (lambda d: d.update(maximize=["foo"]), "'foo' - at `$.maximize[0]`"),
        (lambda d: d.update(allow=["foo"]), "'foo' - at `$.allow[0]`"),
        (lambda d: d.update(ended="foo"), "'foo' - at `$.ended`"),
        (lambda d: d.update(enough_rows=-3), "at `$.enough_rows`"),
        (lambda d: d.update(seconds=-1), "at `$.seconds`"),
        (lambda d: d.update(budget_bytes=1 << 61), "at `$.budget_bytes`"),
        (lambda d: d["expected"].update(seconds_per_step=0.0), "at `$.expected.seconds_per_step`"),
        (lambda d: d["expected"].update(margin_bytes=-1), "at `$.expected.margin_bytes`"),
        (lambda d: d["buckets"][0].update(sequences=0), "at `$.buckets[0].sequences`"),
        (lambda d: d["padding"].update(before=5), "at `$.padding.before`"),
        (lambda d: d["padding"].update(after=-3), "at `$.padding.after`"),
    ],
)
def test_a_wrong_form_is_told_with_its_place(edit: Edit, message: str) -> None:
    error = refused(edited(edit, bucketed()))
    assert "x.json does not have the right form" in error.got
    assert message in error.got


@pytest.mark.parametrize("name", ["nowhere.json", "."])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, name: str) -> None:
    error = attempt(lambda: load_plan(tmp_path / name) and None)
    assert has_three_beats(error)
    assert "cannot be read" in str(error)


def test_a_file_that_is_far_too_large_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    error = attempt(lambda: load_plan(path) and None)
    assert has_three_beats(error)
    assert "it is larger than 256.00 MiB" in str(error)


# what contradicts itself


def other_record(content: dict[str, Any], **changes: Any) -> None:
    """The chosen candidate's record, here and in the list."""
    for record in (content["record"], content["records"][1]):
        record.update(changes)


def other_knobs(content: dict[str, Any], **knobs: Any) -> None:
    other_record(content, candidate=content["candidate"] | knobs)


def of_another_version(content: dict[str, Any]) -> None:
    """Its estimates are not checked then."""
    content["environment"]["oomguard"] = "0.0.0"


def other_gradient(content: dict[str, Any]) -> None:
    of_another_version(content)
    content["fallbacks"][0]["candidate"].update(precision="bf16")


def other_setting(content: dict[str, Any], target: int, **knobs: Any) -> None:
    content["buckets"][target]["candidate"].update(knobs)


def not_run(content: dict[str, Any]) -> None:
    other_record(content, verdict="OOM")
    content.update(ooms=1)


CONTRADICTIONS: dict[str, tuple[Edit, str]] = {
    "the batch": (
        lambda d: d["candidate"].update(accumulation=99),
        "candidate cannot be run: Microbatch x accumulation must give the batch",
    ),
    "the batch of a fallback": (
        lambda d: d["fallbacks"][0]["candidate"].update(accumulation=99),
        "fallbacks[0].candidate cannot be run: Microbatch x accumulation must give the batch",
    ),
    "segments longer than the sequence": (
        lambda d: d["fallbacks"][-1]["candidate"].update(segments=10_001),
        "candidate cannot be run: --segments must be a whole number from 1 to 10,000, but got 10,001",
    ),
    "the estimate": (
        lambda d: d["estimate"].update(total_bytes=1),
        "estimate is not what the knobs give",
    ),
    "a term": (
        lambda d: d["estimate"]["terms"].update(weights=1),
        "estimate is not what the knobs give",
    ),
    "the estimate of a fallback": (
        lambda d: d["fallbacks"][1]["estimate"].update(total_bytes=1),
        "fallbacks[1].estimate is not what the knobs give",
    ),
    "knobs that the estimate is not of": (
        lambda d: d["candidate"].update(microbatch=1, accumulation=32),
        "estimate is not what the knobs give",
    ),
    "a spec that the estimate is not of": (
        lambda d: d["spec"].update(hidden=1024),
        "estimate is not what the knobs give",
    ),
    "a device that the estimate is not of": (
        lambda d: d["where"].update(runtime_bytes=1),
        "estimate is not what the knobs give",
    ),
    "a device that is no card": (
        lambda d: d["where"].update(cuda=False),
        "where.cuda is false, and where.device is a100-80gb",
    ),
    "two devices": (lambda d: d["where"].update(device="t4"), "where.device is not environment.device"),
    "an engine of the other device": (
        lambda d: d["candidate"].update(engine="onednn"),
        "candidate cannot be run: On a100-80gb, lstm runs on cudnn or native",
    ),
    "what was fixed": (lambda d: d.update(fixed={"microbatch": 3}), "fixed.microbatch is not what the candidate has"),
    "a knob that there is not": (lambda d: d.update(fixed={"foo": 3}), "fixed.foo is not what the candidate has"),
    "fallbacks that rise": (
        lambda d: d["fallbacks"].reverse(),
        "fallbacks[1].expected.peak_bytes is not below that of the fallback before",
    ),
    "fallbacks that stay": (
        lambda d: d["fallbacks"].append(d["fallbacks"][-1]),
        "expected.peak_bytes is not below that of the fallback before",
    ),
    "a fallback over the budget": (
        lambda d: d["fallbacks"][0]["expected"].update(peak_bytes=d["budget_bytes"] + 1),
        "fallbacks[0].expected.peak_bytes, ",
    ),
    "a fallback with other threads": (
        lambda d: d["fallbacks"][0]["candidate"].update(threads=3),
        "fallbacks[0].candidate.threads is not that of the chosen candidate",
    ),
    "what plain PyTorch does": (
        lambda d: d["plain"].update(fits=not d["plain"]["fits"]),
        "plain.fits is false, and its peak and margin say otherwise",
    ),
    "fallbacks with another gradient": (
        other_gradient,
        "fallbacks[0].candidate.precision is not that of the chosen candidate",
    ),
    "a peak over the budget": (
        lambda d: d.update(budget_bytes=500 * MIB),
        "the peak of 618.00 MiB is over budget_bytes, 500.00 MiB",
    ),
    "the number of probes": (lambda d: d.update(probes=7), "probes or ooms is not what the records say"),
    "the number that ran out": (lambda d: d.update(ooms=1), "probes or ooms is not what the records say"),
    "records that were taken out": (lambda d: d["records"].pop(0), "probes or ooms is not what the records say"),
    "a record that is not among the records": (
        lambda d: d["record"].update(peak_bytes=617 * MIB),
        "record is not one of the chosen candidate",
    ),
    "a record of another candidate": (
        lambda d: other_knobs(d, microbatch=1, accumulation=32),
        "record is not one of the chosen candidate",
    ),
    "a record in another precision": (
        lambda d: other_knobs(d, precision="bf16"),
        "record is not one of the chosen candidate",
    ),
    "a record of another model": (
        lambda d: other_record(d, spec=d["spec"] | {"hidden": 8}),
        "record is not one of the chosen candidate",
    ),
    "a record that did not run": (
        not_run,
        "record is not one of the chosen candidate",
    ),
    "a variable that is no setting of an allocator": (
        lambda d: d.update(exports={"LD_PRELOAD": "evil.so"}),
        "exports has 'LD_PRELOAD', which is no setting of an allocator",
    ),
    "a variable that no process can have": (
        lambda d: d.update(exports={"MALLOC_A=b": "1"}),
        "exports has 'MALLOC_A=b', which is no setting of an allocator",
    ),
    "a value that no process can be started with": (
        lambda d: d.update(exports={"MALLOC_A": "1\0"}),
        "exports.MALLOC_A is no value that a process can be started with",
    ),
    "a bucket's batch": (
        lambda d: other_setting(d, 0, accumulation=99),
        "buckets[0].candidate cannot be run: Microbatch x accumulation must give the batch",
    ),
    "a bucket's window": (
        lambda d: other_setting(d, 0, window=10, segments=1),
        "buckets[0].candidate.window is lossy, and allow does not have it",
    ),
    "a bucket's precision": (
        lambda d: other_setting(d, 1, precision="bf16"),
        "buckets[1].candidate.precision is not that of the chosen candidate",
    ),
    "a bucket's threads": (
        lambda d: other_setting(d, 1, threads=7),
        "buckets[1].candidate.threads is not that of the chosen candidate",
    ),
    "a bucket over the budget": (
        lambda d: d["buckets"][0]["expected"].update(peak_bytes=d["budget_bytes"]),
        "buckets[0].expected, peak and margin, is over budget_bytes",
    ),
    "a bucket of longer sequences": (
        lambda d: d["buckets"][-1].update(longest=9000),
        "buckets does not end with the longest of spec.lengths",
    ),
    "the sequences of a bucket": (
        lambda d: d["buckets"][0].update(sequences=1),
        "buckets[0].sequences is not what spec.lengths has of such lengths",
    ),
    "a bucket that was taken out": (
        lambda d: d["buckets"].pop(),
        "buckets does not end with the longest of spec.lengths",
    ),
    "buckets in another order": (
        lambda d: d["buckets"].reverse(),
        "buckets[0].sequences is not what spec.lengths has of such lengths",
    ),
    "a bucket twice": (
        lambda d: d["buckets"].append(d["buckets"][-1]),
        "longest is not above that of the bucket before",
    ),
}


@pytest.mark.parametrize("name", [*CONTRADICTIONS])
def test_what_was_changed_by_hand_is_refused_with_what_does_not_agree(name: str) -> None:
    edit, message = CONTRADICTIONS[name]
    error = refused(edited(edit, bucketed() if "bucket" in name else None))
    assert error.rule == "A plan must agree with itself"
    assert error.got.startswith("in x.json, ")
    assert message in error.got
    assert ".." not in str(error)
    assert "make the plan again" in error.advice


@pytest.mark.parametrize("allow", [[], ["window"]])
def test_a_lossy_knob_that_was_not_allowed_is_refused(allow: list[str]) -> None:
    error = refused(edited(lambda d: d.update(allow=allow), lossy()))
    assert "candidate.precision is lossy, and allow does not have it" in error.got


def test_a_card_that_is_said_to_be_the_processor_is_told_with_the_file() -> None:
    def edit(content: dict[str, Any]) -> None:
        content["where"].update(cuda=True)

    assert "in x.json, where.cuda is true, and where.device is cpu" in refused(edited(edit, plan_of())).got


@pytest.mark.parametrize(
    ("kind", "known"), [(Aim, AIMS), (Allowed, ALLOWED), (Ended, tuple(ENDED))], ids=["aims", "allow", "ended"]
)
def test_what_a_plan_may_say_is_what_a_search_takes(kind: Any, known: tuple[str, ...]) -> None:
    assert get_args(kind) == known


def test_estimates_of_another_oomguard_are_not_judged() -> None:
    def edit(content: dict[str, Any]) -> None:
        of_another_version(content)
        content["estimate"]["total_bytes"] += 1

    assert decode_plan(edited(edit)).environment.oomguard == "0.0.0"


# this device


def test_a_plan_for_another_device_is_refused() -> None:
    plan = measured()
    error = attempt(lambda: check_device(plan, "another card", 80 * GIB))
    assert has_three_beats(error)
    assert f"it was made on {plan.environment.title}, and this is another card" in str(error)


def test_a_plan_that_needs_more_than_is_free_is_refused() -> None:
    plan = measured()
    error = attempt(lambda: check_device(plan, plan.environment.title, 600 * MIB))
    assert has_three_beats(error)
    assert "The plan needs 618.00 MiB" in str(error)
    assert "--budget 600.00MiB" in str(error)


def test_a_plan_that_fits_what_is_free_is_taken() -> None:
    plan = measured()
    check_device(plan, plan.environment.title, plan.peak_bytes)


# writing


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_save_that_is_cut_off_leaves_the_old_file_and_nothing_else(
    path: Path, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_plan(reckoned(), path)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((KeyboardInterrupt, MisuseError)):
        save_plan(measured(), path)
    assert load_plan(path) == reckoned()
    assert [*path.parent.iterdir()] == [path]


def test_the_file_is_on_the_disk_before_it_takes_the_old_ones_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(name: str) -> None:
        real = getattr(os, name)

        def call(*words: Any) -> Any:
            done.append(name)
            return real(*words)

        monkeypatch.setattr(os, name, call)

    noting("fsync")
    noting("replace")
    save_plan(reckoned(), path)
    assert done[:2] == ["fsync", "replace"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_it_is_what_the_umask_says(path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        save_plan(reckoned(), path)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("name", [".", "file/plan.json"])
def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    error = attempt(lambda: save_plan(reckoned(), tmp_path / name) and None)
    assert has_three_beats(error)
    assert "needs a writable file" in str(error)
    assert "cannot be written" in str(error)


# data, never code


def test_nothing_in_a_plan_is_executed(tmp_path: Path, path: Path) -> None:
    code = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    plan = measured(
        exports={"MALLOC_X_": f"$(touch {tmp_path}/ran)", "MALLOC_Y_": code},
        environment=msgspec.structs.replace(measured().environment, system=code, title="{0.__class__}", driver=code),
    )
    save_plan(plan, path)
    again = load_plan(path)
    assert again == plan
    assert again.environment.system == code
    assert again._repr_html_()
    assert not (tmp_path / "ran").exists()


def test_the_public_names_are_these() -> None:
    assert oomguard.load_plan is load_plan
