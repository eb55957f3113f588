"""The recorder of one process of a script: its budget, its peak, its recurrent calls and its updates.

It does nothing before the first recurrent call of a training or the first update of an optimizer. From then on, a
thread reads the memory in use, and writes all notes every second: so they are there however the process ends.
"""

import mmap
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import msgspec
import torch

from oomguard._core.units import MIB
from oomguard._device.budget import Budget
from oomguard._device.find import find_budget
from oomguard._device.proc import read_resident, read_status
from oomguard._probe.verdict import Verdict, judge
from oomguard._rnn import recompute
from oomguard._rnn.room import Request, context_bytes
from oomguard._run.notes import GIVEN, CallNotes, Failure, ProcessNotes, Settings, write_notes

SAMPLE_SECONDS = 0.02  # seconds between two readings of the memory in use: one takes some 10 µs
WRITE_SECONDS = 1.0  # seconds between two readings of the budget, and two writings of the notes
BALLAST_BYTES = MIB  # committed, never touched: freed at the end, so that notes can be written where memory ran out


class Recorder:
    """Takes the notes of this process."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "RANK" in os.environ else 1
        self.forget()

    def forget(self) -> None:
        """Begin again without notes: a forked process writes its own, once it trains itself."""
        self.notes: ProcessNotes | None = None
        self.lock = threading.Lock()
        self.calls = dict[tuple[object, ...], CallNotes]()
        self.began, self.first_update, self.first_peak_bytes = 0.0, 0.0, 0
        self.update_bytes = 0  # the most in use since the last update, as far as it was read
        self.ballast: mmap.mmap | None = None

    def begin(self, device: str) -> ProcessNotes:
        """Return the notes of this process. The first call, which tells the device, starts the thread."""
        with self.lock:
            if self.notes is None:
                rank = os.environ.get("RANK", "")
                self.notes = ProcessNotes(
                    pid=os.getpid(), rank=int(rank) if rank.isdecimal() else None, python=sys.executable, device=device
                )
                self.began, self.ballast = monotonic(), mmap.mmap(-1, BALLAST_BYTES, mmap.MAP_PRIVATE)
                self.first_peak_bytes = _host_peak()
                self.notes.base_bytes = self.notes.now_bytes = self.update_bytes = in_use(device)
                self._read_budget(self.notes)
                threading.Thread(target=self._watch, args=(self.notes,), name="oomguard", daemon=True).start()
            return self.notes

    @property
    def spare_bytes(self) -> int:
        """The bytes that calls may still take, by the last reading of the memory in use."""
        notes = self.notes
        return 0 if notes is None else notes.budget_bytes - notes.room_bytes - notes.now_bytes

    def add_call(
        self, where: str, request: Request, shape: tuple[int, int], need_bytes: int, used_bytes: int, segments: int
    ) -> None:
        """Note a call of so many steps and rows: what it needs at once, and in the segments that it runs in."""
        call = request.call
        key = (where, request.device, call.cell, call.inputs, call.hidden, call.layers, call.directions)
        with self.lock:
            assert self.notes is not None, "the first call begins the notes"
            found = self.calls.get(key)
            if found is None:
                found = CallNotes(
                    where=where,
                    device=request.device,
                    **{name: getattr(call, name) for name in ("cell", "inputs", "hidden", "layers", "directions")},
                )
                self.calls[key] = found
                self.notes.calls.append(found)
            found.calls += 1
            found.in_segments += segments > 1
            found.segments = max(found.segments, segments)
            if need_bytes > found.plain_bytes:
                found.plain_bytes, found.used_bytes = need_bytes, used_bytes
                found.steps, found.rows = shape

    def add_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note an update. After those of a dry run, the process ends."""
        notes, now = self.begin(_device_of(optimizer)), monotonic()
        self._sample(notes)
        with self.lock:
            notes.updates += 1
            if notes.updates == 1:
                self.first_update, notes.lasting_bytes = now, 0 if optimizer is None else _lasting_bytes(optimizer)
            notes.seconds = now - self.first_update
            self._learn(notes)
        if self.settings.dry_run is not None and notes.updates >= self.settings.dry_run:
            notes.dry = True
            self._end_dry_run(notes)

    def _learn(self, notes: ProcessNotes) -> None:
        """Leave more room to what comes after the calls, if the update took more than the budget."""
        over_bytes = self.update_bytes - notes.budget_bytes
        if over_bytes > 0 and notes.calls:
            notes.room_bytes = min(notes.room_bytes + over_bytes, notes.budget_bytes)
        self.update_bytes = notes.now_bytes

    def _end_dry_run(self, notes: ProcessNotes) -> None:
        """End this process at once: code after the training, such as one that saves a model, must not run."""
        self.write(notes, ended=True)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something else
                stream.flush()
        os._exit(0)

    def end(self) -> None:
        """Write the last notes. Called when the interpreter ends; an error that ended the script is judged."""
        if self.ballast is not None:
            self.ballast.close()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        failure = None
        if isinstance(error, Exception):
            message = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:300]
            failure = Failure(verdict=judge(error).name, message=message)
        if self.notes is None and (failure is None or failure.verdict != Verdict.OOM.name):
            return
        notes = self.begin("cpu")
        notes.failure = failure
        self.write(notes, ended=True)

    def write(self, notes: ProcessNotes, *, ended: bool = False) -> None:
        self._sample(notes)
        with self.lock:
            notes.ended = ended
            notes.recomputed_seconds = recompute.spent.seconds
            notes.host_peak_bytes = host_bytes = max(notes.host_peak_bytes, _host_peak())
            if notes.device == "cpu":
                notes.peak_bytes = max(notes.peak_bytes, host_bytes)
                if host_bytes > self.first_peak_bytes:
                    notes.training_bytes = host_bytes
            else:
                reached_bytes = context_bytes(notes.device) + torch.cuda.max_memory_reserved(notes.device)
                notes.peak_bytes = max(notes.peak_bytes, reached_bytes)
            with suppress(OSError):  # the folder is gone: oomguard run was killed
                write_notes(self.folder, notes)

    def _sample(self, notes: ProcessNotes) -> None:
        notes.now_bytes = in_use(notes.device)
        notes.peak_bytes = max(notes.peak_bytes, notes.now_bytes)
        notes.training_bytes = max(notes.training_bytes, notes.now_bytes)
        self.update_bytes = max(self.update_bytes, notes.now_bytes)

    def _watch(self, notes: ProcessNotes) -> None:
        written, written_at = b"", 0.0
        while notes is self.notes and not notes.ended:
            self._sample(notes)
            if monotonic() - written_at >= WRITE_SECONDS:
                written_at = monotonic()
                self._read_budget(notes)
                if (content := msgspec.json.encode(notes)) != written:
                    written = content
                    self.write(notes)
            sleep(SAMPLE_SECONDS)

    def _read_budget(self, notes: ProcessNotes) -> None:
        """Read the budget again: what others hold changes. Processes on one machine share what is free."""
        budget = find_budget(notes.device)
        committed = budget.least("committed")
        if committed is not None:
            notes.committed_bytes, notes.committed_budget_bytes = committed.held_bytes, committed.reach_bytes
        if self.settings.budget_bytes is not None:
            notes.budget_bytes, notes.budget_name = self.settings.budget_bytes, GIVEN
        else:
            notes.budget_bytes, notes.budget_name = _share(budget, self.ranks)


def _share(budget: Budget, ranks: int) -> tuple[int, str]:
    """The bytes that one of several processes may reach, and the limit that says so. An rlimit is each one's own."""
    shares = [
        (limit.reach_bytes if "RLIMIT" in limit.name else limit.held_bytes + limit.left_bytes // ranks, limit.name)
        for limit in budget.limits
        if limit.unit == "resident"
    ]
    return min(shares)


def in_use(device: str) -> int:
    """The bytes that this process uses on a device now, as a budget counts them."""
    return read_resident() if device == "cpu" else context_bytes(device) + torch.cuda.memory_reserved(device)


def _host_peak() -> int:
    status = read_status()
    return 0 if status is None else status.peak_bytes


def _device_of(optimizer: torch.optim.Optimizer | None) -> str:
    """The device of the first weight of an optimizer, if it is a card; else the CPU."""
    weights = [] if optimizer is None else optimizer.param_groups[0]["params"][:1]
    return next((str(weight.device) for weight in weights if weight.device.type == "cuda"), "cpu")


def _lasting_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the gradients and of the state of an optimizer, as far as it keeps that in dense tensors."""
    gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
    state = [value for each in optimizer.state.values() if isinstance(each, dict) for value in each.values()]
    tensors = [each for each in (*gradients, *state) if isinstance(each, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.layout == torch.strided)
