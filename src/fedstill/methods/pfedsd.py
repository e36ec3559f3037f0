"""pFedSD: a client's own past model teaches the freshly downloaded global one.

    min_w  CE(w) + λ·R(v_k, w),     R = τ²·KL( q_τ(v_k) ‖ q_τ(w) ),     q_τ(·) = softmax(logits / τ)
    start: w ← w_t        afterwards: v_k ← w_k, and w_k goes up        server: w_{t+1} = mean of the w_k, uniform

Jin et al., "Personalized Edge Intelligence via Federated Self-Knowledge Distillation", IEEE TPDS 2022. Eq. 3 and Algorithm 1.

Choices: (1) The paper's Eq. 3 has no τ², the authors' code has it: `scale_by_temperature`. (2) In its first round a
client has no past model: plain CE. (3) The teacher runs in evaluation mode without gradient, over all local data at once:
at the start of a round (teacher="model"), or after training, when its predictions are kept for the next round
(teacher="predictions": no pass at the start; v_k stays only as the client's result). Same numbers. (4) Table 9's other
regularisers: mse on logits (mean over classes), l2 = ½‖w − v_k‖², ewc = ½·Σ F·(w − v_k)² with the empirical Fisher
diagonal of v_k on the client's data. (5) `ramp`: λ rises linearly over this share of the rounds (§4.4 proposes a rise,
and no form). (6) `stateless`: the server keeps v_k and sends it down with w; it learns v_k from the upload anyway. (7)
BatchNorm's statistics are averaged with the weights; v_k keeps its own. (8) A client that never took part is scored with
the current global model; stateless, one of which the server has no v_k. (9) The authors never call `.eval()` on the teacher:
`teacher_mode`="train" leaves its dropout on and gives its BatchNorm the batch's statistics, so that it must run on each batch.
(10) §3.1: "v_k could also be replaced by other personalized models". `teacher`="ditto": v_k is Ditto's, trained beside w by
CE(v) + teacher_lam/2·‖v − w_t‖², and also the client's result. (11) §3.1: "the global model could be produced … in a cluster
manner". `clusters` > 1: the server keeps so many models and sends each client its own cluster's. It divides the first
uploads, all trained from w, by Lloyd's algorithm on their weights; later an upload belongs to the nearest model, and a
client that has none yet is sent the mean of all, which is the generic model.

`SelfDistillation` is Algorithm 1; `PFedSD`, the method, adds what choices 3 to 11 name. Its defaults are Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core import terms, tree
from ..core.batch import Batch
from ..core.closed import ClosedForm, Taught
from ..core.errors import InputError
from ..core.method import Phase, Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from . import clustered
from .fedavg import FedAvg

TEACHER = 1  # the stream of a teacher's dropout


@dataclass(frozen=True, kw_only=True)
class SelfDistillation(FedAvg, mean="uniform"):
    """Algorithm 1: the client's last personal model teaches the downloaded one."""

    id: ClassVar[str] = ""  # the base of `PFedSD`
    paper: ClassVar[str] = "Jin et al., TPDS 2022"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")

    lam: float = setting(0.5, "λ, weight of the distillation", least=0)
    tau: float = setting(1.0, "τ, temperature of the softmax", above=0)
    scale_by_temperature: bool = setting(True, "multiply the KL by τ², as the authors' code does")

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰."""
        return {"v": params}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t; what v_k predicts on all local data; λ, which is 0 while there is no v_k."""
        lam = self.lam * task.seen.to(task.net.dtype)
        return {"params": down["params"], "lam": lam, "teacher": task.teach(memory["v"])}

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w) + λ·R(v_k, w)."""
        logits = task.logits(params, batch)
        penalty: Tensor = local["lam"] * self.penalty(task, params, logits, local, batch)
        return task.fit(logits, batch) + penalty

    def penalty(self, task: Task, params: Params, logits: Tensor, local: Tree, batch: Batch) -> Tensor:
        """R = τ²·KL(q_τ(v_k) ‖ q_τ(w))."""
        scale = self.tau**2 if self.scale_by_temperature else 1.0
        return scale * task.distill(self.taught(task, local, batch), logits, self.tau, batch)

    def closed_form(self, task: Task, local: Tree) -> ClosedForm | None:
        """CE, and v_k's predictions with λ·τ²."""
        weight = float(local["lam"]) * (self.tau**2 if self.scale_by_temperature else 1.0)
        return ClosedForm(taught=(Taught(local["teacher"]["rows"], weight, self.tau),))

    def taught(self, task: Task, local: Tree, batch: Batch) -> Tensor:
        """Return v_k's logits for the batch."""
        return task.taught(local["teacher"], batch)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up; v_k ← w_k."""
        return {"params": local["params"]}, {"v": local["params"]}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v_k, or the global model for a client that never took part."""
        return tree.where(task.seen, memory["v"], down["params"])


@dataclass(frozen=True, kw_only=True)
class PFedSD(SelfDistillation):
    """Self-distillation: the client's last personal model teaches the downloaded one."""

    id: ClassVar[str] = "pfedsd"
    per_sample: ClassVar[frozenset[str]] = frozenset({"logits"})
    averages: ClassVar[bool] = True
    noisy_mean: ClassVar[bool] = True
    noisy_steps: ClassVar[bool] = True

    teacher: Literal["model", "predictions", "ditto"] = setting(
        "model", "run the past model, keep its predictions, or learn from a personal model of Ditto's instead"
    )
    teacher_mode: Literal["eval", "train"] = setting(
        "eval", "train: the teacher's dropout stays on (the authors' code)"
    )
    teacher_lam: float = setting(1.0, "Ditto's λ of the teacher ditto", least=0)
    regulariser: Literal["kl", "mse", "l2", "ewc"] = setting("kl", "how the past model holds the new one (Table 9)")
    ramp: float = setting(0.0, "share of the rounds over which λ rises linearly; 0: constant", least=0, most=1)
    stateless: bool = setting(False, "the server keeps the personal models and sends them down")
    clusters: int = setting(1, "global models, one for each cluster of clients; 1: one for all", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stateless and self.teacher == "predictions":
            raise InputError(
                "teacher", "predictions", "'model' with stateless: predictions on a client's data stay there"
            )
        if self.stateless and self.teacher == "ditto":
            raise InputError(
                "teacher", "ditto", "'model' with stateless: Ditto's personal model never leaves its client"
            )
        if self.teacher_mode == "train" and self.teacher == "predictions":
            raise InputError(
                "teacher_mode", "train", "'eval' with teacher 'predictions', which are made once for all batches"
            )
        if self.teacher == "ditto":  # trained without noise, it shapes what goes up
            object.__setattr__(self, "noisy_steps", False)
        if self.clusters > 1:
            for flag in ("averages", "noisy_mean", "robust"):  # there is a mean for each cluster
                object.__setattr__(self, flag, False)

    def check(self, task: Task) -> None:
        """Refuse more clusters than clients, and a Fisher diagonal of samples that DP-SGD should protect: it goes up later."""
        super().check(task)
        if self.clusters > task.clients:
            raise InputError("clusters", self.clusters, f"at most {task.clients}, the number of clients")
        if task.augment is not None and self.teacher == "predictions":
            right = "'model' with augment: kept predictions are those of the samples as they are"
            raise InputError("teacher", self.teacher, right)
        if task.private is not None and self.regulariser == "ewc":
            right = "'kl', 'mse' or 'l2' with privacy 'local', which does not cover the Fisher diagonal"
            raise InputError("regulariser", self.regulariser, right)

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰, and what goes with it; nothing where the server keeps v_k."""
        return {} if self.stateless else self._no_past(task, params)

    def _no_past(self, task: Task, params: Params) -> Tree:
        """Return what stands for v_k, and what goes with it, before there is one."""
        past: Tree = {"v": params}
        if self.regulariser == "ewc":
            past["fisher"] = tree.zeros(task.trainable(params))
        if self.teacher == "predictions":
            past["logits"] = tree.scalar_zero(params).new_zeros((0, *task.objective.output[:-1], task.net.outputs))
        return past

    def init_server(self, task: Task, params: Params) -> Tree:
        """w; stateless also every v_k that has come up."""
        clusters: Tree = {"centres": {}, "cluster": {}} if self.clusters > 1 else {}
        if not self.stateless:
            return {"params": params, **clusters}
        return {
            "params": params,
            "none": {**self._no_past(task, params), "known": tree.scalar_zero(params)},
            "past": {},
            **clusters,
        }

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """w, or the model of the client's cluster; stateless also v_k, and whether the server has one."""
        past = {"past": server["past"].get(str(client), server["none"])} if self.stateless else {}
        own = server["cluster"].get(str(client)) if self.clusters > 1 else None
        return {"params": server["params"] if own is None else server["centres"][str(int(own))], **past}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t; what the regulariser takes of v_k; λ, which is 0 while there is no v_k."""
        past = down["past"] if self.stateless else memory
        known = past["known"] if self.stateless else task.seen.to(task.net.dtype)
        rise = min(1.0, task.round / (self.ramp * task.rounds)) if self.ramp else 1.0
        local: Tree = {"params": down["params"], "lam": self.lam * rise * known}
        if self.teacher == "ditto":
            local |= {"own": past["v"], "anchor": task.trainable(down["params"])}
        if self.regulariser in ("l2", "ewc"):
            return {**local, "v": task.trainable(past["v"]), "fisher": past.get("fisher", {})}
        if self.teacher_mode == "train":
            return {**local, "past": past["v"]}
        kept = self.teacher == "predictions"
        return {**local, "teacher": {"rows": past["logits"]} if kept else task.teach(past["v"])}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The experiment's epochs; of the teacher ditto as many again."""
        return (Phase(), Phase(model="own", loss=self.teacher_loss)) if self.teacher == "ditto" else (Phase(),)

    def teacher_loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(v) + teacher_lam/2·‖v − w_t‖²: Ditto's personal objective."""
        return self.fit(task, params, batch) + self.teacher_lam * terms.proximal(
            task.trainable(params), local["anchor"]
        )

    def taught(self, task: Task, local: Tree, batch: Batch) -> Tensor:
        """Return v_k's logits for the batch: looked up, or in training mode."""
        if self.teacher_mode == "train":
            return task.beside(local["past"], batch, TEACHER)
        return super().taught(task, local, batch)

    def closed_form(self, task: Task, local: Tree) -> ClosedForm | None:
        """That of Algorithm 1 with the past model's predictions, or with ‖w − v_k‖²; else there is none."""
        if self.regulariser == "l2":
            return ClosedForm(pull=float(local["lam"]), anchor=local["v"])
        if self.regulariser != "kl" or self.teacher_mode == "train":
            return None
        return super().closed_form(task, local)

    def penalty(self, task: Task, params: Params, logits: Tensor, local: Tree, batch: Batch) -> Tensor:
        """R, by the regulariser."""
        if self.regulariser == "l2":
            return terms.proximal(task.trainable(params), local["v"])
        if self.regulariser == "ewc":
            return terms.ewc(task.trainable(params), local["v"], local["fisher"])
        if self.regulariser == "mse":
            return task.objective.squared_error(self.taught(task, local, batch), logits, batch)
        return super().penalty(task, params, logits, local, batch)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up; v_k ← w_k, with its Fisher diagonal or its predictions. Stateless all of it goes up."""
        past: Tree = {"v": local["own"] if self.teacher == "ditto" else local["params"]}
        if self.regulariser == "ewc":
            past["fisher"] = task.local_gradient(
                lambda p, b: task.each(task.net(p, b.x, train=False), b),
                past["v"],
                squared=True,
            )
        if self.teacher == "predictions":
            past["logits"] = task.local_logits(past["v"])
        if self.stateless:
            return {"params": past["v"], "fisher": past.get("fisher", {})}, {}
        return {"params": local["params"]}, past

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """The mean of the w_k, also by cluster; stateless also v_k ← w_k, as the client trained it."""
        clusters = self._merge_clusters(task, server, uploads) if self.clusters > 1 else {}
        server = {**super().merge(task, server, uploads), **clusters}
        if not self.stateless:
            return server
        past = dict(server["past"])
        for upload in uploads:
            fisher = {"fisher": upload.tree["fisher"]} if self.regulariser == "ewc" else {}
            known = torch.ones_like(server["none"]["known"])
            past[str(upload.client)] = tree.clone({"v": upload.tree["params"], **fisher, "known": known})
        return {**server, "past": past}

    def _merge_clusters(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """Return each cluster's mean of the w_k, and whose cluster is which; none until there are enough uploads at once."""
        centres: dict[str, Params] = server["centres"]
        if not centres and len(uploads) < self.clusters:
            return {}
        models = [task.trainable(upload.params) for upload in uploads]
        starts: list[Params] = [centres[str(c)] if centres else server["params"] for c in range(self.clusters)]
        trained = [task.trainable(start) for start in starts]
        of = clustered.nearest(models, trained) if centres else clustered.divide(models, self.clusters)
        new: dict[str, Params] = {}
        for c, start in enumerate(starts):
            own = [upload for upload, cluster in zip(uploads, of, strict=True) if cluster == c]
            mean = task.average([upload.params for upload in own], self.shares(own), start) if own else {}
            new[str(c)] = {**start, **mean}
        places = {str(u.client): torch.tensor(c) for u, c in zip(uploads, of, strict=True)}
        return {"centres": new, "cluster": {**server["cluster"], **places}}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v_k, or the global model where there is none."""
        if not self.stateless:
            return super().personal(task, down, memory)
        return tree.where(down["past"]["known"] > 0, down["past"]["v"], down["params"])
