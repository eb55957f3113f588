"""`oomguard train`, `resume` and `predict`."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from oomguard._cli import flags, parsing
from oomguard._cli.flags import JSON, LOUDNESS, Flag
from oomguard._cli.program import FITS, INTERRUPTED, Answer, answer, command, restart_with, say
from oomguard._core.errors import conflict
from oomguard._core.progress import tell

PLANS = Flag("plan", "PLAN", "Plan file, or one for each kind of card or each process.", many=True, optional=True)
_TRAINING = [*LOUDNESS, JSON]
_TASK: dict[str, Any] = {"Plan of a task (if there is none yet)": flags.TASK_PLANNED}


@command("train", PLANS, Data=flags.DATA, Training=flags.TRAINED, **_TASK, Output=_TRAINING)
def _train(*, plan: list[str] | None = None, json: bool = False, **values: Any) -> Answer:
    """Train a plan on data. If memory gets tight, the guard falls back to a smaller candidate and loses nothing.

    A task of your own has its data with it. Without a plan file, it is planned first.

    The process restarts itself with the allocator settings of the plan. Ctrl-C ends training after the current step,
    with a checkpoint. Several processes train together if torchrun starts them. Where their cards differ, give the plan
    of each kind of card: every process takes its own.

    [bold]Examples[/bold]

    - oomguard train plan.json
    - oomguard train plan.json --data prices.csv --target close --epochs 20
    - oomguard train plan.json --data book.txt --steps 9000 --run book
    - oomguard train plan.json --data book.txt --steps 9000 --run book --resume
    - torchrun --nproc-per-node 2 -m -- oomguard train plan.json --data waves.npy
    - torchrun --nproc-per-node 2 -m -- oomguard train a100.json t4.json
    - oomguard train --model package.module:task --budget 6GiB --epochs 20

    Exit codes: 0 done, 1 out of memory on the last fallback (with a checkpoint), 2 wrong usage.
    """
    from oomguard._plan.value import Plan
    from oomguard._report.progress import result_json, show_training
    from oomguard._train.plans import own_plan
    from oomguard._train.settings import settle

    loaded = own_plan(plan) if plan else None
    data, options = parsing.read_training(values, loaded)
    if loaded is None:
        tell("Starting PyTorch")
        from oomguard._train.task_start import plan_of_run

        loaded, path = plan_of_run(data, options)
        if not json:
            say(str(loaded))
        restart_with(loaded.exports, path)
    elif isinstance(loaded, Plan):
        settle(loaded, data, values.get("model"), options)  # misuse is told before torch is imported
    restart_with(loaded.exports)
    from oomguard._api.train import train

    first = os.environ.get("RANK", "0") == "0"  # of several processes that torchrun started, one prints
    result = train(loaded, data, **options)
    code = INTERRUPTED if result.ended == "interrupted" else FITS
    if not first:
        return Answer("", code)
    return answer(json, lambda: result_json(result), partial(show_training, result), code)


@command("resume", flags.RUN, Data=flags.DATA, Training=flags.RESUMED, Output=[*LOUDNESS, JSON])
def _resume(*, run: str, **values: Any) -> Answer:
    """Go on with a training run, with its own plan, data and options.

    [bold]Examples[/bold]

    - oomguard resume runs/lstm-1000
    - oomguard resume runs/lstm-1000 --epochs 40
    - oomguard resume runs/lstm-1000 --data moved/prices.csv

    Exit codes: 0 done, 1 out of memory on the last fallback (with a checkpoint), 2 wrong usage.
    """
    from oomguard._train.plans import plans_of

    plans = [*map(str, plans_of(run))]
    answer: Answer = _train(plan=plans, **values | {"run": run, "resume": True})
    return answer


@command("predict", flags.RUN, Data=flags.READ, Text=flags.DRAWN, Task=flags.PREDICTING, Output=flags.PREDICTED)
def _predict(*, run: str, **values: Any) -> Answer:
    """Predict every sequence of some data with the model of a run: the best by validation, otherwise the last.

    The data (default: that of the training) must have the form of the training data. It is read with the options of
    the training, unless flags change them. A model of text goes on with a prompt instead, and the text is printed. A
    task of your own has its data with it, and a function predict.

    [bold]Examples[/bold]

    - oomguard predict runs/lstm-1000 --data new.csv --output predictions.csv
    - oomguard predict book --data more.txt --probabilities
    - oomguard predict book --prompt Once --length 200 --temperature 0.8 --seed 0
    - oomguard predict book --data more.txt --device cpu --output next.npy
    - oomguard predict runs/tagger --model package.module:task
    """
    from oomguard._api.train import predict
    from oomguard._train.settings import check_predicted, check_task_predicted, is_task_run, read_request

    if any(option.name in values for option in flags.DRAWN):
        asked = parsing.read_options(values, [*flags.READ, *flags.DRAWN, *flags.PREDICTED])
        read_request({"prompt": None} | asked)
        return Answer(f"{predict(run, **asked)}\n")
    usual = "predictions.npy"
    written = [flag for flag in flags.PREDICTED if flag is not flags.FORCE]
    options = {"output": usual} | parsing.read_options(values, [*flags.READ[1:], *written])
    if is_task_run(run):
        check_task_predicted(Path(run), values.get("model"), options["output"])
        if "data" in values:
            raise conflict("A task has its own data", "the run of a task", "--data")
        parsing.check_output(options["output"], values, usual)
        return Answer(f"{predict(run, values.get('model'), **options)}\n")
    if "model" in values:
        raise conflict("The run of a spec has its own model", "such a run", "--model")
    check_predicted(Path(run), values.get("data"), options["output"], options)
    parsing.check_output(options["output"], values, usual)
    return Answer(f"{predict(run, values.get('data'), **options)}\n")
