"""Recurrent layers step by step, in operations that `torch.func.vmap` takes; they equal torch's own to rounding.

LSTM   i, f, g, o = W_ih·x + b_ih + W_hh·h + b_hh    c ← σ(f)∘c + σ(i)∘tanh(g)    h ← σ(o)∘tanh(c), projected: W_hr·h
GRU    r, z = σ(…)    n = tanh(W_in·x + b_in + r∘(W_hn·h + b_hn))    h ← (1 − z)∘n + z∘h
RNN    h ← tanh(…), or ReLU
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Kind: TypeAlias = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
State: TypeAlias = tuple[Tensor, ...]  # h, and c of an LSTM


def is_packed(args: Sequence[Any]) -> bool:
    """Return whether the arguments of torch's function, after the input, are those of a packed sequence."""
    return not isinstance(args[1], list | tuple)


def layers(
    kind: Kind,
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    depth: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    drop: Callable[[Tensor, float], Tensor],
) -> tuple[Tensor, ...]:
    """Return the output and the last state(s) of stacked recurrent layers; `drop` is applied between layers in training."""
    start: State = (state,) if isinstance(state, Tensor) else tuple(state)
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    each = len(weights) // (depth * directions)
    ends: list[State] = []
    for layer in range(depth):
        outputs = []
        for backwards in range(directions):
            place = len(ends)
            own = weights[place * each : (place + 1) * each]
            output, end = _scan(kind, x.flip(0) if backwards else x, tuple(s[place] for s in start), own, biased)
            outputs.append(output.flip(0) if backwards else output)
            ends.append(end)
        x = torch.cat(outputs, -1)
        if train and dropout and layer < depth - 1:
            x = drop(x, dropout)
    last = tuple(torch.stack(column) for column in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *last)


def cell(
    kind: Kind,
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Return the next state of a cell."""
    before: State = (state,) if isinstance(state, Tensor) else tuple(state)
    after = _next(kind, F.linear(x, w_ih, b_ih), F.linear(before[0], w_hh, b_hh), before, None)
    return after if kind == "lstm" else after[0]


def _scan(kind: Kind, x: Tensor, state: State, weights: Sequence[Tensor], biased: bool) -> tuple[Tensor, State]:
    """Return a layer's outputs in one direction, and its last state."""
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:4] if biased else (None, None)
    projection = weights[-1] if len(weights) % 2 else None
    outputs = []
    for step in F.linear(x, w_ih, b_ih).unbind(0):
        state = _next(kind, step, F.linear(state[0], w_hh, b_hh), state, projection)
        outputs.append(state[0])
    return torch.stack(outputs), state


def _next(kind: Kind, x: Tensor, h: Tensor, state: State, projection: Tensor | None) -> State:
    """Return the state after a step, from the input's and the hidden state's products with the weights."""
    if kind == "lstm":
        i, f, g, o = (x + h).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        out = o.sigmoid() * c.tanh()
        return (out if projection is None else F.linear(out, projection)), c
    if kind == "gru":
        (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
        z = (x_z + h_z).sigmoid()
        n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
        return ((1 - z) * n + z * state[0],)
    return ((x + h).tanh() if kind == "rnn_tanh" else (x + h).relu(),)


KINDS: dict[Any, Kind] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "rnn_tanh",
    torch.rnn_relu: "rnn_relu",
}
CELLS: dict[Any, Kind] = {
    torch.lstm_cell: "lstm",
    torch.gru_cell: "gru",
    torch.rnn_tanh_cell: "rnn_tanh",
    torch.rnn_relu_cell: "rnn_relu",
}
