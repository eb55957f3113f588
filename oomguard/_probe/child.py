"""The child process of probes: it serves one request after the other until its parent ends.

Requests are JSON lines on stdin. Answers are JSON lines on the original stdout; prints go to stderr. The child ends
with its parent, however that ends: a thread waits for the end of stdin, and the kernel is told to kill the child.

Each probe runs in a thread of its own. The C library caches freed blocks for each thread, scattered over the heap. The
cache ends with the thread, so the next probe finds the heap of a new process. In a single thread, earlier probes raised
the peak of a GRU by up to 2 %.
"""

import faulthandler
import gc
import itertools
import math
import os
import queue
import select
import signal
import threading
import time
import traceback
from statistics import median

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.system import end_with, write_all
from oomguard._core.units import KIB, MIB, format_bytes
from oomguard._device.budget import Reading
from oomguard._device.find import Device, open_device
from oomguard._probe.record import Answer, Request, TaskRequest
from oomguard._probe.verdict import Verdict, judge, judge_reading
from oomguard._spec.candidate import Candidate

LIFELINE_SECONDS = 1.0  # seconds between checks that the parent lives: a process forked from it can keep stdin open
LISTENER_BYTES, PROBE_BYTES = 256 * KIB, 2 * MIB
"""Stack sizes of the listening thread and of a probe's thread. The usual 8 MiB would count as committed in every
record; 2 MiB is the default where the system sets no limit."""
LEFT_BYTES, LEFT_PERCENT, LEFT_PLAIN_PERCENT = 3 * MIB, 1, 2
"""Memory that may be left after a probe before the child is replaced, since the next peak would count it. The first
full step of any process leaves about 1.7 MiB, which every peak counts anyway. Without fixed heap thresholds (`system`,
on the CPU) peaks differ by more than that from run to run."""
LEFT_COMMITTED_BYTES = 16 * MIB
"""Committed bytes that may be left, where they are limited, beyond those after the first probe, when the C library has
cached the stacks of all threads. oneDNN's kernels take up to 14 MiB."""
MESSAGE_CHARACTERS = 300
TURNS = 9  # turns of two candidates that are compared, the first and the last of the same one: 8 pairs of neighbours
AGAIN = (Verdict.FITS, Verdict.STRAINED, Verdict.OVER, Verdict.UNSUPPORTED)
"""Verdicts after which a child may serve again. After others, something may be left that memory does not show."""


AnyRequest = Request | TaskRequest


def main(parent: int, tied: bool) -> None:
    """Serve the process `parent`. `tied`: its main thread started this process, so the kernel can signal its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    faulthandler.enable()
    answers = os.dup(1)
    os.dup2(2, 1)  # nothing that anything prints can come between the answers
    stdin = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # and nothing that anything reads can take a request
    end_with(parent, tied)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.stack_size(LISTENER_BYTES)
    threading.Thread(target=_listen, args=(parent, stdin, requests), daemon=True).start()
    threading.stack_size(PROBE_BYTES)
    server = Server()
    while True:
        write_all(answers, msgspec.json.encode(server.answer(requests.get())) + b"\n")


def _listen(parent: int, stdin: int, requests: "queue.SimpleQueue[bytes]") -> None:
    """Pass on the lines of what was stdin, and end the process as soon as the parent is gone."""
    begun = b""
    while os.getppid() == parent:
        if not select.select([stdin], [], [], LIFELINE_SECONDS)[0]:
            continue
        read = os.read(stdin, 1 << 16)
        if not read:
            break
        *lines, begun = (begun + read).split(b"\n")
        for line in lines:
            requests.put(line)
    os._exit(0)


class Server:
    """Answers requests, and remembers the memory of the new process."""

    def __init__(self) -> None:
        import torch  # slow, so it comes after the listening thread has started

        self.threads = torch.get_num_threads()
        self.base_bytes: int | None = None
        self.committed_bytes: int | None = None
        self.warmed: set[int] = set()  # hashes of what has been warmed up

    def answer(self, line: bytes) -> Answer:
        try:
            request: AnyRequest = msgspec.json.decode(line, type=Request | TaskRequest)
            device = open_device(request.device)
            answer = self._probe(request, device)
            rival = request.rival if isinstance(request, Request) else None
            return answer if rival is None else self._by_turns(request, rival, answer, device)
        except Exception as error:  # a request that cannot be read, or a device that does not work any more
            return _failed(error)

    def _by_turns(self, request: AnyRequest, rival: Candidate, first: Answer, device: Device) -> Answer:
        """Run the rival and the candidate by turns, after the candidate's first turn, and compare neighbouring turns.

        Returns the candidate's turn with the highest peak, or the turn of either that failed. There is no ratio if a
        turn leaves memory behind.
        """
        short = msgspec.structs.replace(request, seconds=2 * request.seconds / TURNS)
        pair, turns = (short, msgspec.structs.replace(short, candidate=rival)), [first]
        while len(turns) < TURNS and turns[-1].fresh and turns[-1].verdict.ran:
            turns.append(self._probe(pair[len(turns) % 2], device))
        last = turns[-1]
        if not last.verdict.ran:
            return last
        logs = [math.log(turn.seconds_per_step or math.inf) for turn in turns]
        logs = [(one - two) * (-1) ** index for index, (one, two) in enumerate(itertools.pairwise(logs))]
        highest = max(turns[::2], key=lambda turn: turn.peak_bytes or 0)
        ratio = math.exp(median(logs)) if len(turns) == TURNS else None
        return msgspec.structs.replace(highest, ratio=ratio, fresh=last.fresh)

    def _probe(self, request: AnyRequest, device: Device) -> Answer:
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(self._attempt(request, device)))
        thread.start()
        _await_end(thread)
        # from here on all frames of the probe are gone, and with them their tensors
        answer = answers.pop()
        reached = device.reading()
        if not answer.steps and answer.verdict is not Verdict.UNSUPPORTED:
            how_far = {"peak_bytes": reached.peak_bytes, "runtime_bytes": reached.runtime_bytes}
            answer = msgspec.structs.replace(answer, **how_far, retries=reached.retries)
        device.release()
        return msgspec.structs.replace(
            answer, fresh=answer.verdict in AGAIN and self._is_as_new(device.reading(), request)
        )

    def _attempt(self, request: AnyRequest, device: Device) -> Answer:
        try:
            return self._measure(request, device)
        except Exception as error:
            device.unlimit()  # formatting the message needs memory too
            return _failed(error)
        finally:
            device.unlimit()

    def _measure(self, request: AnyRequest, device: Device) -> Answer:
        """Warm up, limit, run, read."""
        from oomguard._probe.sample import Meter, SpecMeter
        from oomguard._probe.task import TaskMeter

        self._warm_up(request, device)
        device.release()
        device.enforce(request.budget_bytes, request.committed_bytes)
        device.reset()
        meter: Meter = SpecMeter(request, device) if isinstance(request, Request) else TaskMeter(request, device)
        meter.warm_up()
        verdict = Verdict.FITS
        while verdict is not Verdict.OVER and len(meter.update_seconds) < request.steps:
            spent = sum(meter.pass_seconds) + sum(meter.update_seconds)
            if len(meter.pass_seconds) >= request.passes and spent >= request.seconds:
                break
            meter.step()
            reading = device.reading()
            verdict = judge_reading(reading, request.budget_bytes, request.committed_bytes)
        terms = {"runtime": reading.runtime_bytes} | meter.sizes
        return Answer(
            verdict=verdict,
            message=f"It peaked at {format_bytes(reading.peak_bytes)} of {format_bytes(request.budget_bytes)}.",
            peak_bytes=reading.peak_bytes,
            committed_bytes=reading.committed_peak_bytes,
            runtime_bytes=reading.runtime_bytes,
            allocated_bytes=reading.allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
            terms=terms | {"rest": reading.peak_bytes - sum(terms.values())},
            retries=reading.retries,
            library=device.library(),
            **meter.figures(),
        )

    def _warm_up(self, request: AnyRequest, device: Device) -> None:
        """Prepare the device, and load the kernels of the steps (once for each kind), so that they count as runtime."""
        import torch

        from oomguard._probe.sample import run_tiny, tiny_candidate, tiny_spec
        from oomguard._probe.task import run_tiny_task

        if request.candidate.threads is None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)  # otherwise it would have the threads of the last candidate
        device.settle(request.candidate)
        if isinstance(request, Request):
            spec = tiny_spec(request.spec)
            kind = hash(msgspec.json.encode((spec, tiny_candidate(spec, request.candidate), request.device)))
        else:
            kind = hash((request.name, request.content))
        if kind not in self.warmed:
            run_tiny(request, device) if isinstance(request, Request) else run_tiny_task(request, device)
            self.warmed.add(kind)
            device.release()
            gc.freeze()  # what is loaded now stays: searching it for garbage again took half of a small probe's time
        if self.base_bytes is None:
            self.base_bytes = device.reading().now_bytes

    def _is_as_new(self, now: Reading, request: AnyRequest) -> bool:
        """Whether the memory of this process is back where it was, as far as the next peak could tell."""
        if isinstance(request, TaskRequest):  # what was left raised the next peak by 0.6 to 1.7 MiB, up to 3 %
            return False
        if self.base_bytes is None:  # the candidate was refused before anything ran
            return True
        if self.committed_bytes is None:
            self.committed_bytes = now.committed_bytes
        left_committed_bytes = (now.committed_bytes or 0) - (self.committed_bytes or 0)
        plain = request.device == "cpu" and request.candidate.allocator == "system"
        share = self.base_bytes * (LEFT_PLAIN_PERCENT if plain else LEFT_PERCENT) // 100
        return now.now_bytes - self.base_bytes <= max(LEFT_BYTES, share) and (
            request.committed_bytes is None or left_committed_bytes <= LEFT_COMMITTED_BYTES
        )


def _await_end(thread: threading.Thread) -> None:
    """Wait until the system has ended the thread, which is a moment after Python has."""
    thread.join()
    ask = getattr(os, "sched_getscheduler", None)
    while ask is not None:
        try:
            ask(thread.native_id)
        except ProcessLookupError:
            return
        time.sleep(0.0005)


def _failed(error: Exception) -> Answer:
    """Turn an exception into an answer. Only its text is kept."""
    words, verdict, misuse = str(error).strip().partition("\n")[0] or type(error).__name__, judge(error), None
    if isinstance(error, MisuseError) and verdict is Verdict.UNSUPPORTED:
        misuse = {"rule": error.rule, "got": error.got, "advice": error.advice}
    return Answer(
        verdict=verdict,
        misuse=misuse,
        message=words[:MESSAGE_CHARACTERS],
        error="".join(traceback.format_exception(error)),
    )
