"""Google's fedjax: federated_averaging with its jit backend, a model in Haiku.

fedjax 0.0.17 still calls `jax.tree_map`, which jax has since moved to `jax.tree_util`: it is given back. Its pmap backend needs
more that jax has removed, so on two cores it is XLA that uses them.
"""

from __future__ import annotations

import fedjax
import haiku as hk
import jax
import numpy as np
from fedjax.algorithms import fed_avg
from wire import Turn

if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree_util.tree_map
turn = Turn()
spec = turn.spec
with np.load(spec["data"]) as found:
    xs, ys = found["x"][..., None], found["y"].astype(np.int32)


def like_torch(layer, fan_in: int, *size, **more):
    """A layer that starts as PyTorch's does; Haiku's own law has √3 times the spread, and its loss falls faster."""
    uniform = hk.initializers.RandomUniform(-(fan_in**-0.5), fan_in**-0.5)
    return layer(*size, w_init=uniform, b_init=uniform, **more)


def forward(batch):
    x, convolutions = batch["x"], spec["workload"] != "mlp"
    if convolutions:
        for channels in (32, 64):
            padding = "SAME" if spec["workload"] == "cnn-same" else "VALID"
            convolution = like_torch(hk.Conv2D, 25 * x.shape[-1], channels, 5, padding=padding)
            x = hk.max_pool(jax.nn.relu(convolution(x)), (2, 2, 1), (2, 2, 1), "VALID")
    x, hidden = x.reshape(len(x), -1), 512 if convolutions else 128
    return like_torch(hk.Linear, hidden, 10)(jax.nn.relu(like_torch(hk.Linear, x.shape[1], hidden)(x)))


sample = {"x": xs[0, :1], "y": ys[0, :1]}
model = fedjax.create_model_from_haiku(
    hk.transform(forward),
    sample,
    lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores),
)
batches = fedjax.ShuffleRepeatBatchHParams(batch_size=spec["batch"], num_epochs=1, seed=0)
fedjax.set_for_each_client_backend("jit")
algorithm = fed_avg.federated_averaging(
    fedjax.model_grad(model), fedjax.optimizers.sgd(spec["lr"]), fedjax.optimizers.sgd(1.0), batches
)
data = fedjax.InMemoryFederatedData({k: {"x": xs[k], "y": ys[k]} for k in range(spec["clients"])})
sampler = fedjax.client_samplers.UniformGetClientSampler(data, spec["cohort"], seed=0)
state = algorithm.init(model.init(jax.random.PRNGKey(0)))


def one_round():
    global state
    cohort = sampler.sample()
    state, diagnostics = algorithm.apply(state, cohort)
    jax.block_until_ready((state.params, diagnostics))
    return cohort


def steps(cohort) -> int:
    return sum(1 for _, dataset, _ in cohort for _ in dataset.shuffle_repeat_batch(batches))


def loss() -> float:
    some = {"x": xs[:, :50].reshape(-1, 28, 28, 1), "y": ys[:, :50].reshape(-1)}
    return float(model.train_loss(some, model.apply_for_eval(state.params, some)).mean())


turn.ready("fedjax", "jax", "dm-haiku")
turn.serve(one_round, steps, loss)
