"""The explorer as a widget for notebooks. Its questions go to the kernel, wherever that runs."""

from typing import Any

from oomguard._core.errors import MisuseError
from oomguard._explore.explorer import Explorer
from oomguard._explore.server import script, style

try:
    import anywidget
    import traitlets
except ImportError:
    raise MisuseError(
        rule="oomguard.explore needs the package anywidget",
        got="it is not installed",
        advice="Run pip install 'oomguard[explore]'. Outside of notebooks, use the command oomguard explore.",
    ) from None

_RENDER = """
export default {
  render({ model, el }) {
    let last = 0;
    const waiting = new Map();
    model.on("msg:custom", ({ id, reply }) => { waiting.get(id)?.(reply); waiting.delete(id); });
    const ask = (kind, settings) => new Promise((resolve) => {
      waiting.set(++last, resolve);
      model.send({ id: last, kind, settings });
    });
    const { controls, settings, probes } = model.get("data");
    mount(el, { ask, controls, probes, settings: { ...settings } });
  },
};
"""


class ExplorerWidget(anywidget.AnyWidget):
    """An explorer in the output of a notebook cell."""

    _esm = script().replace('"use strict";', "") + _RENDER
    _css = style()
    data = traitlets.Dict().tag(sync=True)

    def __init__(self, explorer: Explorer) -> None:
        settings = dict(explorer.settings)
        super().__init__(data={"controls": explorer.controls(), "settings": settings, "probes": explorer.probes})
        self._explorer = explorer
        self.on_msg(self._reply)

    @property
    def answer(self) -> dict[str, Any]:
        """What the explorer shows at first."""
        return self._explorer.whole_answer(self._explorer.settings)

    def __repr__(self) -> str:
        """What the explorer shows at first, as text: where no kernel runs, widgets cannot be shown."""
        found = self._explorer.answer(self._explorer.settings)
        if "error" in found:
            return str(found["error"])
        width = max(len(bar["name"]) for bar in found["bars"])
        bars = [f"  {bar['name']:<{width}} {bar['text']:>11}" for bar in found["bars"]]
        return "\n".join([found["title"], f"{found['verdict']}. {found['moment']}", *bars])

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return None if data is None else (data | {"text/plain": repr(self)}, metadata)

    def _reply(self, _: Any, message: dict[str, Any], __: Any) -> None:
        reply = self._explorer.measure if message.get("kind") == "measure" else self._explorer.answer
        self.send({"id": message.get("id"), "reply": reply(message.get("settings", {}))})
