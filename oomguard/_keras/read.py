"""Read the configuration of a Keras model from a file: `.keras`, `.json` or `.h5`.

Keras and TensorFlow are not imported, nothing is unpickled, and no code of the file is run. Weights are not read.
"""

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard._core.errors import MisuseError, shown, visible
from oomguard._core.system import check_regular, file_errors, read_file, run_elsewhere
from oomguard._core.units import MIB, format_bytes

SUFFIXES = (".keras", ".json", ".h5", ".hdf5")
MAX_CONFIG_BYTES = 64 * MIB  # the configuration of a model of 1,000 layers has 2 MiB
ADVICE = "Save the model again: model.save('model.keras')."


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a file says of a model."""

    path: str
    model: dict[str, Any]  # class name and configuration, as Keras writes them
    loss: Any = None  # as given to `compile`; None if the model was not compiled
    optimizer: Any = None


def is_keras(name: object) -> bool:
    """Whether the name is that of a file of Keras, by its suffix."""
    return isinstance(name, str) and Path(name).suffix.lower() in SUFFIXES


def read_saved(path: str) -> Saved:
    """Read a file. Its content decides the format: a zip archive, HDF5 or JSON."""
    rule = "A Keras model is read from a file that model.save or model.to_json has written"
    with file_errors(rule, visible(path), "Check the path.", use="read"):
        try:
            check_regular(path)
            with open(path, "rb") as file:
                magic = file.read(8)
        except ValueError:
            raise _unreadable(path, "no file can have such a name") from None
    if magic[:2] == b"PK":
        return _saved(path, _parsed(path, _from_zip(path)))
    if magic == b"\x89HDF\r\n\x1a\n":
        return _from_h5(path)
    with file_errors(rule, visible(path), "Give the configuration alone: model.to_json().", use="read"):
        content = read_file(Path(path), MAX_CONFIG_BYTES)
    return _saved(path, _parsed(path, content))


def _unreadable(path: str, why: str, advice: str = ADVICE) -> MisuseError:
    got = f"{visible(path)} is not readable ({visible(why)})"
    return MisuseError(rule="A Keras model is a .keras, .json or .h5 file", got=got, advice=advice)


def _from_zip(path: str) -> bytes:
    """The member config.json of an archive, if it is not too large when it is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("config.json") as member:
            content = member.read(MAX_CONFIG_BYTES + 1)
    except KeyError:
        raise _unreadable(path, "the archive has no config.json") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, OSError, ValueError) as error:
        raise _unreadable(path, f"the archive is damaged: {str(error)[:200]}") from None
    if len(content) > MAX_CONFIG_BYTES:
        raise _unreadable(path, f"its config.json is larger than {format_bytes(MAX_CONFIG_BYTES)}")
    return content


def _parsed(path: str, content: bytes | str) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise _unreadable(path, "its JSON is nested too deeply") from None
    except ValueError as error:  # wrong syntax, or no text
        raise _unreadable(path, f"it is no JSON: {str(error)[:200]}") from None


def _saved(path: str, content: Any) -> Saved:
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict | list):
        raise _unreadable(path, "it has no class_name and config of a model")
    compiled = content.get("compile_config")
    compiled = compiled if isinstance(compiled, dict) else {}
    return Saved(path=path, model=content, loss=compiled.get("loss"), optimizer=compiled.get("optimizer"))


def _from_h5(path: str) -> Saved:
    """The configuration in the attributes of an HDF5 file, read in a child: damaged files can crash the library."""
    try:
        model, training = run_elsewhere(__name__, "read_attributes", path)
    except ChildProcessError:
        raise _unreadable(path, "the process that read it crashed") from None
    saved = _saved(path, _parsed(path, model))
    compiled = _parsed(path, training) if training else {}
    compiled = compiled if isinstance(compiled, dict) else {}
    return Saved(path=path, model=saved.model, loss=compiled.get("loss"), optimizer=compiled.get("optimizer_config"))


def read_attributes(path: str) -> tuple[str, str | None]:
    """The texts of a model and of its training in an HDF5 file; None if the second is missing."""
    try:
        import h5py
    except ImportError:
        raise MisuseError(
            rule="Reading an .h5 file needs the package h5py",
            got="it is not installed",
            advice="Run `pip install 'oomguard[keras]'`, or give the configuration alone: model.to_json().",
        ) from None
    try:
        with h5py.File(path, "r") as file:
            texts = [file.attrs.get(name) for name in ("model_config", "training_config")]
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise _unreadable(path, f"the HDF5 file is damaged: {str(error)[:200]}") from None
    model, training = (text.decode(errors="replace") if isinstance(text, bytes) else text for text in texts)
    if model is None:
        raise _unreadable(path, "it has weights only, no model_config", "Save the whole model: model.save(...).")
    for text in (model, training):
        if text is not None and (not isinstance(text, str) or len(text) > MAX_CONFIG_BYTES):
            raise _unreadable(path, f"its model_config is {shown(text)}")
    return model, training
