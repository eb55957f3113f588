"""Text that a trained model of characters or bytes goes on with, one token at a time."""

from pathlib import Path

import torch
from torch import Tensor

from oomguard._core.errors import MisuseError, shown
from oomguard._data.files import BYTE_TOKENS
from oomguard._device.find import open_device
from oomguard._plan.store import load_spec_plan
from oomguard._rnn.model import Recurrent, State
from oomguard._rnn.run import autocast, without_graph
from oomguard._spec.spec import Spec
from oomguard._train.checkpoint import Model, TrainState, build_model, load_weights
from oomguard._train.evaluate import find_checkpoint
from oomguard._train.settings import TextRequest


class Alphabet:
    """The tokens of a text: characters of a vocabulary, or bytes."""

    def __init__(self, vocabulary: str | None) -> None:
        self.vocabulary = vocabulary
        self.size = BYTE_TOKENS if vocabulary is None else len(vocabulary)

    def read(self, text: str) -> list[int]:
        """The tokens of a text, each of which is in the vocabulary."""
        if self.vocabulary is None:
            return [*text.encode()]
        tokens = {character: token for token, character in enumerate(self.vocabulary)}
        for place, character in enumerate(text):
            if character not in tokens:
                advice = "Take it out: the model was trained without it."
                got = f"character {place:,} of the prompt is {shown(character)}"
                raise MisuseError(rule="Every character must be in the vocabulary", got=got, advice=advice)
        return [tokens[character] for character in text]

    def write(self, tokens: list[int]) -> str:
        """The text of some tokens."""
        if self.vocabulary is None:
            return bytes(tokens).decode(errors="replace")
        return "".join(self.vocabulary[token] for token in tokens)


def run_text(run: Path, request: TextRequest, *, device: str | None = None, model: Model = None) -> str:
    """The prompt, and the characters or bytes after it that the model of a run draws, each given all before."""
    prompt, length, temperature, seed = request
    checkpoint = find_checkpoint(run)
    plan, state = load_spec_plan(run / "plan.json"), checkpoint.state
    spec = checkpoint.spec or plan.spec
    alphabet = _alphabet(spec, state)
    tokens = alphabet.read(prompt)
    if max(tokens) >= (spec.vocab or 0):
        advice = "Leave out characters that the training did not have."
        raise MisuseError(rule=f"A token is below {spec.vocab:,}", got=f"the prompt has {max(tokens):,}", advice=advice)
    target = open_device(plan.where.device if device is None else device)
    network = build_model(model or state.model, spec).to(target.name)
    load_weights(checkpoint, network)
    target.settle(checkpoint.candidate)
    generator = torch.Generator().manual_seed(seed)
    limit = min(alphabet.size, spec.classes)
    precision = checkpoint.candidate.precision
    with without_graph(network), autocast(precision, network.device.type):
        logits, carried = _go_through(network, tokens)
        for number in range(length):
            tokens.append(_draw(logits[:limit], temperature, generator))
            if number + 1 < length:
                logits, carried = _step(network, tokens[-1:], carried)
    return alphabet.write(tokens)


def _alphabet(spec: Spec, state: TrainState) -> Alphabet:
    """The tokens of the text that a run was trained on."""
    rule = "Text is drawn from a model that predicts the next token of a text"
    if state.data.get("kind") != "text" or spec.vocab is None or spec.head != "per-step":
        advice = "Leave --prompt out, and give --data."
        raise MisuseError(rule=rule, got="this run was trained on something else", advice=advice)
    if spec.bidirectional:
        advice = "Train one without --bidirectional."
        raise MisuseError(rule=rule, got="this model has seen the tokens that come after", advice=advice)
    return Alphabet(state.data.get("vocabulary"))


def _go_through(network: Recurrent, tokens: list[int]) -> tuple[Tensor, State]:
    """The prediction after the last token, in pieces as long as the sequences of the training."""
    carried: State | None = None
    for start in range(0, len(tokens), network.spec.steps):
        logits, carried = _step(network, tokens[start : start + network.spec.steps], carried)
    assert carried is not None, "there is at least one token"
    return logits, carried


def _step(network: Recurrent, tokens: list[int], carried: State | None) -> tuple[Tensor, State]:
    """Go on with some tokens; returns the prediction after the last on the CPU, and the state to go on with."""
    inputs = torch.tensor([tokens] if network.spec.batch_first else [[token] for token in tokens])
    outputs, after = network(inputs.to(network.device), carried)
    return outputs.flatten(0, 1)[-1].double().cpu(), after


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
