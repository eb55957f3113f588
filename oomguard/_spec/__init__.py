"""The spec of a model, its presets, and candidates: one value for every knob."""
