"""The forgetting gap (pFedSD's Fig. 2): what a client loses when the download takes the place of the model it had trained.

    gap_k = acc(v_k) − acc(w),     forgetting = mean of gap_k over the participants that took part before
    of errors  err(w) − err(v_k)

v_k is the model with which client k ended its local training when it last took part (of several models, the one trained last);
w the downloaded one, completed by the client's own parts where a method sends only some. Both on the client's own test data, and
w before training. A method that sends nothing (Local) has no gap. Orders to train ask the edge for both (`Order.watch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..transport.messages import Reply
from .score import Score, register


def forgetting(replies: Sequence[Reply], history: Sequence[Mapping[str, Any]], lower: bool = False) -> dict[str, Any]:
    """Return what a round's record says of its participants' replies, given the history so far; `lower`: of errors."""
    watched = [reply for reply in replies if "tests" in reply.report]
    if not watched:
        return {}
    last: dict[str, float] = {}  # each client's accuracy when it last ended its training
    for record in history:
        last.update(record.get("trained_clients", {}))
    downloaded, trained = (
        {str(r.client): r.report[name] / r.report["tests"] for r in watched} for name in ("downloaded", "trained")
    )
    gaps = [(rate - last[k] if lower else last[k] - rate) for k, rate in downloaded.items() if k in last]
    gap = {"forgetting": float(np.mean(gaps))} if gaps else {}
    return {**gap, "downloaded_clients": downloaded, "trained_clients": trained}


EXPLANATION = (
    "accuracy of the model that a participant had trained in its last round minus that of the downloaded "
    "one, on its own test data; mean over participants, then over the last 10 rounds that have one"
)
register(Score("forgetting", {"forgetting": "forgetting %"}, lambda training: {"forgetting": EXPLANATION}))
