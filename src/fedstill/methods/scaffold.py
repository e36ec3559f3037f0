"""SCAFFOLD: each client's gradient is corrected by how its drift differs from everybody's.

    y ← y − η·(∇CE(y) − c_k + c)                          (K local steps from y = x)
    c_k⁺ = c_k − c + (x − y)/(K·η)                        (option II, control="travelled")
    c_k⁺ = ∇CE_k(x), over all of the client's data         (option I, control="gradient")
    x ← x + η_g·mean(y − x),     c ← c + |S|/N·mean(c_k⁺ − c_k)

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

Choices: (1) option II, η_g = 1, and means over the participants are uniform, as in the paper's Algorithm 1. (2) No
momentum, whatever the experiment says: option II reads c_k off the distance travelled, which momentum would inflate.
(3) Control variates and η_g cover trainable parameters; BatchNorm's buffers take the plain mean. (4) Other optimisers
than SGD, clipping, and rates that change within a round make the distance another thing than a mean gradient, so option
II refuses them. Option I takes any: the optimiser is given the corrected gradient. Its gradient at x is taken in
evaluation mode, without augmentation, which is one more pass over the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.errors import InputError
from ..core.method import Phase, Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class SCAFFOLD(FedAvg, mean="uniform"):
    """Control variates correct each client's drift."""

    id: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    noisy_steps: ClassVar[bool] = True
    coupled: ClassVar[frozenset[str]] = frozenset({"c"})  # c is the mean of all c_k

    server_lr: float = setting(1.0, "η_g, the server's step", above=0)
    control: Literal["travelled", "gradient"] = setting(
        "travelled", "how c_k is measured: by the distance travelled (option II), or by the gradient at x (option I)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.control == "gradient":  # taken without noise, it goes up
            object.__setattr__(self, "noisy_steps", False)

    def check(self, task: Task) -> None:
        """Refuse local work whose distance is no mean gradient."""
        super().check(task)
        if self.control == "gradient" or task.recipe.plain:
            return
        recipe = task.recipe
        changed: dict[str, tuple[object, object]] = {  # with what option II takes
            "optimizer": (recipe.optimizer, "sgd"),
            "clip_gradient": (recipe.clip, 0.0),
            "lr_schedule_over": ("steps" if recipe.by_step else "rounds", "rounds"),
        }
        field, (value, right) = next((name, pair) for name, pair in changed.items() if pair[0] != pair[1])
        why = "c_k is read off the distance travelled"
        raise InputError(field, value, f"{right!r} for scaffold, or its control 'gradient': {why}")

    def init_server(self, task: Task, params: Params) -> Tree:
        """x, and c = 0."""
        return {"params": params, "c": tree.zeros(task.trainable(params))}

    def init_client(self, task: Task, params: Params) -> Tree:
        """c_k = 0."""
        return {"c": tree.zeros(task.trainable(params))}

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """x and c."""
        return {"params": server["params"], "c": server["c"]}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """y ← x, with the correction c − c_k."""
        return {"params": down["params"], "correction": tree.sub(down["c"], memory["c"])}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The experiment's epochs, without momentum."""
        return (Phase(momentum=0.0),)

    def correct(self, task: Task, local: Tree, grads: Params) -> Params:
        """∇CE(y) − c_k + c."""
        return tree.add(grads, local["correction"])

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """c_k⁺ by option II; y − x and c_k⁺ − c_k go up."""
        x, y = task.trainable(down["params"]), task.trainable(local["params"])
        if self.control == "gradient":
            delta_c = tree.sub(self.slope(task, down["params"]), memory["c"])
        else:
            k_eta = task.here().steps * task.rate
            delta_c = tree.map(lambda x, y, c: (x - y) / k_eta - c, x, y, down["c"])
        return (
            {"params": tree.sub(local["params"], down["params"]), "c": delta_c},
            {"c": tree.add(memory["c"], delta_c)},
        )

    def slope(self, task: Task, params: Params) -> Params:
        """Return ∇F_k of the data loss, over all of the client's data."""

        def each(params: Params, batch: Batch) -> Tensor:
            return task.each(task.net(params, batch.x, train=False), batch)

        return task.local_gradient(each, params)

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """x ← x + η_g·mean(Δy), c ← c + |S|/N·mean(Δc)."""
        mean, x = task.average([u.tree for u in uploads], self.shares(uploads)), server["params"]
        return {
            "params": {**tree.add(x, mean["params"]), **tree.add(task.trainable(x), mean["params"], self.server_lr)},
            "c": tree.add(server["c"], mean["c"], len(uploads) / task.clients),
        }
