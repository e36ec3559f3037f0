"""fedstill: personalised federated learning by distillation.

    import fedstill as fs
    fed = fs.Federation.from_arrays([(x_train, y_train, x_test, y_test), ...])
    run = fs.simulate(fs.PFedSD(lam=0.5, tau=3.0), model=net, data=fed, rounds=3)
    run.personal(0), run.generic(), run.history, print(run.table())

A method is a frozen dataclass with pure hooks (`fedstill.core.method`); every method in `fedstill.methods` is here by its name.
The names are those of `fedstill.api`, which is imported, and PyTorch with it, when one of them is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .core import startup as _startup  # noqa: F401 - before what takes seconds
from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from .api import *  # noqa: F403
    from .api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Return a name of `fedstill.api`, or a subpackage, both imported now."""
        if name != "__all__" and name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name != FUNCTION and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        api = importlib.import_module(f"{__name__}.api")
        globals().update({each: getattr(api, each) for each in api.__all__}, __all__=[*api.__all__, "__version__"])
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        """Return what there is, for completion."""
        return sorted({*globals(), *__getattr__("__all__")})


FUNCTION = "run"  # a function of `fedstill.api`, and a subpackage


class _Front(ModuleType):
    """This module, on which `import fedstill.run.…` would set `run` to the subpackage: it stays the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != FUNCTION or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Front
