"""What the help of each subcommand says, and what is said of a command line that it does not take."""

from typing import Any

from oomguard.checks import nearest, shown
from oomguard.errors import MisuseError
from oomguard.presets import PRESETS


def flowing(text: str) -> str:
    """A help text whose paragraphs the terminal breaks where it ends; lists stay as they are.

    >>> flowing("One\\nsentence.\\n\\n- a\\n- b")
    'One sentence.\\n\\n- a\\n- b'
    """
    return "\n\n".join(one if one.startswith("- ") else one.replace("\n", " ") for one in text.split("\n\n"))


# examples are short enough for a terminal of 80 columns; the tests parse them all, and run what is cheap
HELP = flowing("""\
Train LSTM, GRU and RNN models on long sequences without running out of memory.

[bold]Start here[/bold]

- oomguard estimate --model lstm --seq 10000 [dim]  will it fit?[/dim]
- oomguard plan --model lstm --seq 10000 [dim]      what should I run?[/dim]
- oomguard train plan.json --data FILE [dim]        run it[/dim]""")

PRESET_LINES = "\n".join(f"- [bold]{name}[/bold]: {sentence}" for name, (sentence, _) in PRESETS.items())
ESTIMATE_HELP = flowing(f"""\
Predict the peak memory of one candidate by arithmetic: no run, no GPU, no torch.

[bold]Examples[/bold]

- oomguard estimate --model lstm --seq 10000
- oomguard estimate --preset char-lm --device rtx-4090 --precision bf16
- oomguard estimate --model spec.toml --segments 100 --budget 6GiB --json

[bold]Presets[/bold]

{PRESET_LINES}

Flags override a preset and a spec file; --no-packed and the like turn a switch of theirs off.

Exit codes: 0 it fits, 1 it does not, 2 the question was wrong.""")

PROBE_HELP = flowing("""\
Run one candidate for a few real steps in a child process, and print its record beside its estimate.

The child is held to the budget: a candidate that is too large ends in a verdict, not in a crash.

[bold]Examples[/bold]

- oomguard probe --model lstm --seq 2000 --batch 8
- oomguard probe --model gru --seq 10000 --segments 50 --threads 1
- oomguard probe --model spec.toml --device cuda --precision bf16 --json

Exit codes: 0 it fits, 1 it does not, 2 the question was wrong.""")

PLAN_HELP = flowing("""\
Find the fastest candidate that fits by a few real probes, and write it down as a plan with its evidence.

Probes run in child processes that are held to the budget. Ctrl-C ends the search with the best plan known then.
For a card that is not here, the plan is made by arithmetic alone.

[bold]Examples[/bold]

- oomguard plan --model lstm --seq 10000
- oomguard plan --preset char-lm --device a100-80gb --maximize throughput,seq
- oomguard plan --model spec.toml --data sales.csv --id shop --ledger runs

Exit codes: 0 there is a plan, 1 nothing fits (and what would help is said), 2 the question was wrong.""")

TRADEOFFS_HELP = flowing("""\
Show what each setting costs in memory and brings in speed: a table, curves, or a page of them.

By arithmetic, for any device; with a plan or a ledger, calibrated by what was measured. Without --over it varies
microbatch, segments and precision. A range is 1..64 (all), 1..64*2 (doublings) or 100..1000+100 (steps).

[bold]Examples[/bold]

- oomguard tradeoffs --model lstm --seq 10000 --device a100-80gb
- oomguard tradeoffs --plan plan.json --output tradeoffs.html
- oomguard tradeoffs --model gru --over seq=1000..64000*2 --over segments=1,16

Exit codes: 0 something fits, 1 nothing does, 2 the question was wrong.""")

SHOW_HELP = flowing("""\
Explain a plan: what was chosen and why, what it rests on, what to expect, what to fall back to.

[bold]Examples[/bold]

- oomguard show plan.json
- oomguard show plan.json --html report.html --sequences 50000
- oomguard show plan.json --json""")

TRAIN_HELP = flowing("""\
Execute a plan on data. If memory gets tight, the guard falls back a rung and loses nothing by it.

The process starts again by itself with the allocator settings that the plan asks for. Ctrl-C ends it after the step,
with a checkpoint. Several processes train together if torchrun starts them.

[bold]Examples[/bold]

- oomguard train plan.json --data prices.csv --target close --epochs 20
- oomguard train plan.json --data book.txt --steps 9000 --run book
- oomguard train plan.json --data book.txt --steps 9000 --run book --resume
- torchrun --nproc-per-node 2 -m -- oomguard train plan.json --data waves.npy

Exit codes: 0 it is trained, 1 memory ran out on the last rung (there is a checkpoint), 2 the question was wrong.""")

PREDICT_HELP = flowing("""\
Let the model of a run (its best by validation, otherwise its last) predict, sequence by sequence.

The data has the form of the training data and is read as it was then, unless flags say otherwise.

[bold]Examples[/bold]

- oomguard predict runs/lstm-1000 --data new.csv --output predictions.csv
- oomguard predict book --data more.txt --probabilities
- oomguard predict book --data more.txt --device cpu --output next.npy""")

DEVICES_HELP = flowing("""\
Show what memory this process may use here, and who says so.

[bold]Examples[/bold]

- oomguard devices
- oomguard devices --cards
- oomguard devices --json""")


def usage_error(error: Any, words: list[str]) -> MisuseError:
    """What typer says of a command line, in three beats."""
    kind, message, option = type(error).__name__, error.format_message(), getattr(error, "option_name", "")
    context = error.ctx
    command = context.command_path if context is not None else f"oomguard {words[0]}"
    if kind == "NoSuchOption" and command == "oomguard":
        advice = f"Write it as in oomguard estimate {option}."
        return MisuseError(
            rule="oomguard takes a command before its options", got=f"got {shown(option)}", advice=advice
        )
    if kind == "NoSuchOption":
        known = [name for one in context.command.params for name in one.opts if not one.hidden]
        rule, advice = f"{command} takes only options that it knows", nearest(option, known)
        advice = advice if advice.startswith("Did") else f"See {command} --help."
        return MisuseError(rule=rule, got=f"got {shown(option)}", advice=advice)
    if kind == "BadOptionUsage" and "requires" in message:
        return MisuseError(rule=f"{option} takes a value", got="got none", advice=f"See {command} --help.")
    if kind == "BadOptionUsage":
        return MisuseError(rule=f"{option} takes no value", got="got one", advice="Leave the value out.")
    if "No such command" in message:
        first = next((word for word in words if not word.startswith("-")), "")
        commands = [*getattr(context.command, "commands", {})]
        rule = f"oomguard has the commands {', '.join(commands)}"
        return MisuseError(rule=rule, got=f"got {shown(first)}", advice=nearest(first, commands))
    if "extra argument" in message:
        extra = message.partition("(")[2].partition("(")[2].rstrip(").") or message
        arguments = [one.metavar for one in context.command.params if one.param_type_name == "argument"]
        what = f"one {' and one '.join(arguments)} and options" if arguments else "options only"
        return MisuseError(rule=f"{command} takes {what}", got=f"got {shown(extra)}", advice="Put a flag before it.")
    if kind == "MissingParameter":
        run = command.endswith("predict")
        what, name = ("the directory of a run", "runs/lstm-1000") if run else ("the file of a plan", "plan.json")
        rule, advice = f"{command} takes {what}", f"Write it as {command} {name}."
        return MisuseError(rule=rule, got="got none", advice=advice)
    return MisuseError(rule=f"{command} must be called as its help says", got=message, advice=f"See {command} --help.")
