"""The laws of a method, for methods of one's own: `fedstill.testing.check(MyMethod())`.

    from fedstill.testing import check
    print(check(MyMethod(lam=0.5), neutral={"lam": 0.0}, parent=fs.FedAvg()))

It needs no pytest. The laws themselves, as functions, are in `fedstill.testing.laws`.
"""

from __future__ import annotations

from .checks import LawError, Outcome, Report, check
from .laws import Broken, Problem

__all__ = ["Broken", "LawError", "Outcome", "Problem", "Report", "check"]
