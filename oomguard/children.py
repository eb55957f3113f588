"""Child processes: how one is started that runs this very package, and a function whose libraries must not stay."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

_START = """\
import sys; sys.path.insert(0, {root!r}); import oomguard; sys.path[:] = {path!r}
{call}"""


def command(call: str) -> list[str]:
    """Of a child that runs a line of Python: this package, wherever it is, and all else from where we have it.

    >>> import subprocess
    >>> subprocess.run(command("print(oomguard.__name__)"), capture_output=True, text=True).stdout
    'oomguard\\n'
    """
    root = str(Path(__file__).parents[1])
    return [sys.executable, "-c", _START.format(root=root, path=[str(place) for place in sys.path], call=call)]


def run_elsewhere(module: str, function: str, *arguments: Any) -> Any:
    """What a function of a module returns or raises, in a process that is gone afterwards.

    Libraries that it imports, and what it holds for a moment, never count as memory of this one.

    >>> run_elsewhere("math", "sqrt", 16.0)
    4.0
    """
    call = f"from {__name__} import _answer; _answer()"
    done = subprocess.run(command(call), input=pickle.dumps((module, function, arguments)), stdout=subprocess.PIPE)
    if done.returncode:
        raise ChildProcessError(f"the process that ran {module}.{function} ended with exit code {done.returncode}")
    returned, value = pickle.loads(done.stdout)
    if returned:
        return value
    raise value


def _answer() -> None:
    """The child's side."""
    import os
    import signal
    from importlib import import_module

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that anything prints can come between
    module, function, arguments = pickle.load(sys.stdin.buffer)
    try:
        answer = (True, getattr(import_module(module), function)(*arguments))
    except Exception as error:
        answer = (False, error.with_traceback(None))
    with answers:
        pickle.dump(answer, answers)
