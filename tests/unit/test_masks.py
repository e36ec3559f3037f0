"""Dropout's masks as one operation: its bits are those of `plan.uniform_bits`, by whatever computes them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedstill.core.plan import uniform_bits
from fedstill.engine import program
from fedstill.nn.draws import Draws
from fedstill.nn.kernels import masks

KEYS = torch.tensor([5, 123456789012345, 2**62 - 1])
LEAST = int(0.3 * 2**32)


def test_the_operation_draws_the_bits_of_the_plan() -> None:
    for keys in (KEYS, KEYS[0], KEYS.reshape(3, 1)):
        expected = uniform_bits(keys, 3, (20,)) >= LEAST
        assert torch.equal(masks._keeps(keys, 3, 20, LEAST), expected)
        assert 0 < expected.float().mean() < 1
    one_by_one = torch.stack([masks._keeps(key, 3, 20, LEAST) for key in KEYS])
    assert torch.equal(vmap(lambda key: masks._keeps(key, 3, 20, LEAST))(KEYS), one_by_one)
    pairs = torch.stack([KEYS, KEYS + 1])
    by_column = vmap(lambda key: masks._keeps(key, 3, 20, LEAST), in_dims=1, out_dims=1)(pairs)
    assert torch.equal(by_column, masks._keeps(pairs, 3, 20, LEAST))


def test_a_step_with_the_operation_is_compiled_as_one_without_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash is followed along both uses of each of its words, so a graph that has one is compiled with another option."""

    def drop(key: torch.Tensor) -> torch.Tensor:
        return Draws(key).dropout(torch.ones(4, 5), 0.3)

    def targets() -> set[object]:
        return {node.target for node in make_fx(vmap(drop), tracing_mode="fake")(KEYS).graph.nodes}

    hashed, expected = targets(), vmap(drop)(KEYS)
    assert hashed & set(program.SHIFTS)
    monkeypatch.setattr(masks, "has_kernel", lambda device: True)
    assert not targets() & set(program.SHIFTS)
    assert torch.equal(vmap(drop)(KEYS), expected)


INTERPRETED = """
    import torch
    from fedstill.core.plan import uniform_bits
    from fedstill.nn.kernels import triton_masks
    g = torch.Generator().manual_seed(0)
    for keys in (torch.randint(0, 2**62, (3,), generator=g), torch.randint(0, 2**62, (2, 2), generator=g), torch.tensor(5)):
        for draw, count in ((1, 7), (3, 1024), (40, 5000)):
            for least in (0, int(0.3 * 2**32), 2**31, 2**32 - 1):
                assert torch.equal(triton_masks.launch(keys, draw, count, least), uniform_bits(keys, draw, (count,)) >= least)
    print("agrees")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: torch's builds for the CPU, as in CI, come without it",
)
def test_the_kernel_by_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(INTERPRETED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "agrees", done.stderr
