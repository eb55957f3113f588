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

    def _reply(self, _: Any, message: dict[str, Any], __: Any) -> None:
        reply = self._explorer.measure if message.get("kind") == "measure" else self._explorer.answer
        self.send({"id": message.get("id"), "reply": reply(message.get("settings", {}))})
