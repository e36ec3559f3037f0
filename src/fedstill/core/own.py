"""Methods and models of one's own, named by where their code is: `my_method.py:MOON`, or `my_module:Net`.

A reference that is kept with results ends with a checksum of the file (`/home/me/my_method.py:MOON@0123456789abcdef`), so that a
run goes on with the code with which it began, or is refused. Importing code runs it: only commands that train
do (`allow`), never a site on a hub's word, and no reader of results.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import HookError, InputError, first_line

REFERENCE = re.compile(r"(?P<where>[^@]+):(?P<name>[A-Za-z_]\w*)(?:@(?P<digest>[0-9a-f]{16}))?", re.ASCII)
LIBRARIES = ("timm", "hf")  # what stands before the colon of a library's model, which is no code of one's own
_allowed = [False]
_references: dict[int, str] = {}  # by the object's identity; what was imported stays


def allow() -> None:
    """Let this process import code that is named by a reference."""
    _allowed[0] = True


def is_reference(text: str) -> bool:
    """Return whether a text names code: MODULE:NAME or FILE.py:NAME.

    >>> [is_reference(text) for text in ("my_method.py:MOON", "package.models:Net", "pfedsd", "shards:2", "timm:vit")]
    [True, True, False, False, False]
    """
    match = REFERENCE.fullmatch(text)
    return match is not None and (
        match["where"].endswith(".py")
        or (match["where"] not in LIBRARIES and all(map(str.isidentifier, match["where"].split("."))))
    )


def load(field: str, text: str) -> Any:
    """Return what a reference names; refuse one whose file has changed since the reference was kept."""
    match = REFERENCE.fullmatch(text)
    assert match is not None
    if not _allowed[0]:
        raise InputError(
            field, text, "one that comes with fedstill: code of one's own is run by run, compare, sweep, resume"
        )
    module, file = (
        _from_file(field, text, Path(match["where"])) if match["where"].endswith(".py") else _module(field, text)
    )
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    if match["digest"] not in (None, digest):
        right = f"the code that it was: {file} has changed since (without @{match['digest']} it is taken as it is now)"
        raise InputError(field, text, right)
    if not hasattr(module, match["name"]):
        raise InputError(field, text, f"a class that is there: {file} has no {match['name']}")
    found = getattr(module, match["name"])
    where = str(file) if match["where"].endswith(".py") else match["where"]
    _references[id(found)] = f"{where}:{match['name']}@{digest}"
    return found


def reference_of(found: object) -> str:
    """Return the reference, with its checksum, of what was loaded by one; "" for anything else."""
    return _references.get(id(found), "")


def short(text: str) -> str:
    """Return the name in a reference, and any other text as it is.

    >>> short("/home/me/net.py:Net@0123456789abcdef"), short("mlp")
    ('Net', 'mlp')
    """
    match = REFERENCE.fullmatch(text)
    return match["name"] if match is not None and is_reference(text) else text


def _from_file(field: str, text: str, path: Path) -> tuple[ModuleType, Path]:
    """Import a file, once, under a name of its own."""
    path = path.expanduser().absolute()
    if not path.is_file():
        raise InputError(field, text, f"a class in a file that exists: there is no {path}")
    name = f"fedstill_own_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise _failed(field, text, error) from error
    return sys.modules[name], path


def _module(field: str, text: str) -> tuple[ModuleType, Path]:
    """Import a module, from the working directory too, as `python -m` does."""
    name = text.partition(":")[0]
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise _failed(field, text, error) from error
    finally:
        sys.path.remove(here)
    if not getattr(module, "__file__", None):
        raise InputError(field, text, f"a class in a module with a file: {name} has none")
    return module, Path(str(module.__file__))


def _failed(field: str, text: str, error: Exception) -> Exception:
    """Return the error to raise: one about a hook is as it is."""
    if isinstance(error, HookError):
        return error
    return InputError(field, text, f"code that can be imported ({type(error).__name__}: {first_line(error)})")
