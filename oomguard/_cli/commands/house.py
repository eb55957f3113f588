"""`oomguard compare`, `clean` and `devices`."""

from functools import partial
from pathlib import Path
from typing import Any

from oomguard._cli import flags
from oomguard._cli.flags import JSON, Flag
from oomguard._cli.program import FITS, MISUSE, Answer, answer, command, say

FOLDER = Flag("folder", "DIR", "Folder of data and runs (default: the current one).", optional=True)
RUNS = Flag("runs", "RUN", "Directories of training runs.", many=True)
CARDS = Flag("cards", "", "List the cards that --device knows by name.", bool)


@command("compare", RUNS, Output=[JSON])
def _compare(*, runs: list[str], json: bool = False, **_: Any) -> Answer:
    """Compare training runs: losses, speed, peak, and the settings of plan and training in which they differ.

    [bold]Examples[/bold]

    - oomguard compare runs/lstm-1000 runs/gru-1000
    - oomguard compare runs/lstm-1000
    - oomguard compare runs/a runs/b runs/c --json
    """
    from oomguard._report.runs import comparison_json, read_runs, show_comparison

    found = read_runs(runs)
    return answer(json, lambda: comparison_json(found), partial(show_comparison, found))


@command("clean", FOLDER, Output=[flags.YES, JSON])
def _clean(*, folder: str = ".", yes: bool = False, json: bool = False, **_: Any) -> Answer:
    """List what oomguard has stored and what killed processes have left, and remove it with --yes.

    That is: calibrations of earlier searches, data that was converted once (beside its file, or in the folder of
    --cache), temporary files of processes that have ended, and conversions and checkpoints that were not finished and
    have not changed for a day. Plans, runs and data stay. Do not remove converted data that a training is reading.

    [bold]Examples[/bold]

    - oomguard clean
    - oomguard clean --yes
    - oomguard clean runs --json
    """
    from oomguard._report.leftovers import leftovers_json, show_leftovers
    from oomguard._train.leftovers import find_leftovers, remove

    found = find_leftovers(Path(folder))
    problems = remove(found) if yes else []
    for problem in problems:
        say(problem)
    code = MISUSE if problems else FITS
    show = partial(show_leftovers, found, removed=yes)
    return answer(json, lambda: leftovers_json(found, removed=yes and not problems), show, code)


@command("devices", Output=[CARDS, JSON])
def _devices(*, cards: bool = False, json: bool = False, **_: Any) -> Answer:
    """Show the devices of this machine, and the memory that this process may use on each.

    [bold]Examples[/bold]

    - oomguard devices
    - oomguard devices --cards
    - oomguard devices --json
    """
    from oomguard._device.find import present_devices
    from oomguard._estimate.cards import card, names
    from oomguard._report.estimate import card_json, devices_json, show_cards, show_devices

    if cards:
        known = [card(name) for name in names()]
        return answer(json, lambda: {"cards": [*map(card_json, known)]}, partial(show_cards, known))
    devices, note = present_devices()
    return answer(json, lambda: devices_json(devices, note), partial(show_devices, devices, note))
