"""What `oomguard run` and the processes of a script write to each other: one JSON file each, in a temporary folder."""

from pathlib import Path

import msgspec

FOLDER = "OOMGUARD_RUN"  # the variable that names the folder
SETTINGS = "settings.json"
GIVEN = "--budget"  # the name of a budget that was given


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a script are to do."""

    budget_bytes: int | None = None  # bytes that each process may use on a device; None: what is free
    segments: bool = True  # whether calls that do not fit run in segments
    dry_run: int | None = None  # updates after which a process ends


class CallNotes(msgspec.Struct, kw_only=True):
    """The recurrent calls of one line of code, with the figures of the one that needs most."""

    where: str  # such as `train.py:42`
    device: str
    cell: str
    inputs: int
    hidden: int
    layers: int
    directions: int
    calls: int = 0
    in_segments: int = 0  # calls that ran in segments
    segments: int = 1  # the most segments of a call
    steps: int = 0  # time steps of the largest call
    rows: int = 0  # its sequences
    plain_bytes: int = 0  # bytes that it needs at once, by arithmetic
    used_bytes: int = 0  # the bytes with the segments that it ran in, by arithmetic


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a process."""

    verdict: str  # name of a Verdict
    message: str


class ProcessNotes(msgspec.Struct, kw_only=True):
    """One process of a script that trains, as it was when it last wrote."""

    pid: int
    rank: int | None = None  # of processes that torchrun started
    python: str = ""
    device: str = "cpu"  # the device of the recurrent calls
    budget_bytes: int = 0  # bytes that it may use there
    budget_name: str = ""  # the limit that sets the budget
    base_bytes: int = 0  # bytes in use when training began
    lasting_bytes: int = 0  # bytes of gradients and of the state of the optimizer
    now_bytes: int = 0
    peak_bytes: int = 0  # of its whole life
    training_bytes: int = 0  # the most in use since training began
    host_peak_bytes: int = 0  # the same in host memory, if the device is a card
    committed_bytes: int | None = None  # committed bytes now, where they are limited
    committed_budget_bytes: int | None = None
    updates: int = 0
    seconds: float = 0.0  # seconds from the first call or update to the last update
    recomputed_seconds: float = 0.0  # seconds in which segments were computed again
    room_bytes: int = 0  # bytes that calls leave to what comes after them, as learned from earlier updates
    retried: int = 0  # calls that ran out of memory and were run again in segments
    calls: list[CallNotes] = msgspec.field(default_factory=list)
    failure: Failure | None = None
    dry: bool = False  # whether --dry-run ended it
    ended: bool = False  # whether it wrote this at its end

    @property
    def largest(self) -> CallNotes | None:
        """The call that needs most memory at once."""
        return max(self.calls, key=lambda call: call.plain_bytes, default=None)


def write_settings(folder: Path, settings: Settings) -> None:
    (folder / SETTINGS).write_bytes(msgspec.json.encode(settings))


def read_settings(folder: Path) -> Settings:
    return msgspec.json.decode((folder / SETTINGS).read_bytes(), type=Settings)


def write_notes(folder: Path, notes: ProcessNotes) -> None:
    """Replace the notes of a process. No `fsync`: they need not survive a power cut."""
    temporary = folder / f"{notes.pid}.new"
    temporary.write_bytes(msgspec.json.encode(notes))
    temporary.replace(folder / f"{notes.pid}.json")


def read_notes(folder: Path) -> list[ProcessNotes]:
    """The notes of all processes, by rank and then by process id."""
    paths = (path for path in folder.glob("*.json") if path.name != SETTINGS)
    notes = [msgspec.json.decode(path.read_bytes(), type=ProcessNotes) for path in paths]
    return sorted(notes, key=lambda each: (each.rank is None, each.rank or 0, each.pid))


def read_failures(folder: Path) -> dict[str, str]:
    """Why interpreters could not load oomguard: the reason by the path of the interpreter."""
    texts = [path.read_text(errors="replace").partition("\n") for path in sorted(folder.glob("*.failed"))]
    return {python: reason.strip() for python, _, reason in texts}
