"""Our SGD against torch's, to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.optim import SGD


@settings(max_examples=40, deadline=None)
@given(
    st.floats(1e-4, 1.0),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.booleans(),
    st.sampled_from([0.0, 1e-5, 0.1]),
    st.integers(0, 99),
)
def test_equal_to_torch_to_the_bit(lr: float, momentum: float, nesterov: bool, decay: float, seed: int) -> None:
    nesterov = nesterov and momentum > 0
    g = torch.Generator().manual_seed(seed)
    start = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in [(7, 5), (3,), ()]]
    theirs = [torch.nn.Parameter(p.clone()) for p in start]
    optimiser = torch.optim.SGD(theirs, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    ours = {str(i): p.clone() for i, p in enumerate(start)}
    sgd = SGD(lr, momentum, nesterov, decay)
    state = sgd.init(ours)
    for _ in range(4):
        grads = [torch.randn(p.shape, generator=g, dtype=torch.float64) for p in start]
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad.clone()
        optimiser.step()
        sgd.update(ours, {str(i): grad.clone() for i, grad in enumerate(grads)}, state)
    assert all(torch.equal(a, b) for a, b in zip(ours.values(), theirs, strict=True))


def test_stacked_parameters_take_the_same_step() -> None:
    g = torch.Generator().manual_seed(1)
    stack, grads = torch.randn(3, 4, generator=g), torch.randn(3, 4, generator=g)
    sgd = SGD(0.1, 0.9, True, 0.01)
    together = {"w": stack.clone()}
    sgd.update(together, {"w": grads.clone()}, sgd.init(together))
    for row in range(3):
        alone = {"w": stack[row].clone()}
        sgd.update(alone, {"w": grads[row].clone()}, sgd.init(alone))
        assert together["w"][row].tolist() == pytest.approx(alone["w"].tolist(), abs=1e-7)
