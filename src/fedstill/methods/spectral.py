"""Spectral co-distillation: a generic and a personal model hold each other through the Fourier spectra of their weights.

    generic phase (E_G):   min  CE(w_G) + λ_G·D( ŝ(w_G) ‖ ŝ(w_p) )        w_G starts from the download, and goes up
    personal phase (E_p):  min  CE(w_p) + λ_p·D( s(w_p) ‖ s(w_G) )        w_p goes on from where it was, and stays
    s(w) = |DFT(vec(w))|,   ŝ = its first ⌈τ·d⌉ entries                   server: w_G ← Σ p_k·w_G,k,  p_k = n_k / Σ n_j

Chen et al., "Spectral Co-Distillation for Personalized Federated Learning", NeurIPS 2023.

Choices: (1) D as printed, Σ p log p − p log q on spectra that do not sum to one, is smallest at p = q/e and its gradient
grows with the number of weights; it does not train. divergence="generalised" adds −p + q (zero exactly at p = q),
"normalised" divides the spectra by their sums, "paper" is the printed form; transform="ortho" scales the DFT by 1/√d,
"raw" not. (2) The other model is fixed in each phase, without gradient; the personal phase holds to the w_G that was just
trained. (3) vec(w) is the trainable parameters in the model's order. (4) E_G is not given: 1; E_p is 3 or 5 in Tables 4
and 9: 3. The personal phase has the experiment's rate, or one of its own (`personal_lr`). (5) BatchNorm's statistics: the
generic model's are averaged with its weights, the personal model keeps its own. (6) A client that never took part is scored
with the current generic model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..core import terms, tree
from ..core.batch import Batch
from ..core.method import Phase
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class SpectralCoDistillation(FedAvg):
    """A generic and a personal model hold each other through the spectra of their weights."""

    id: ClassVar[str] = "spectral"
    paper: ClassVar[str] = "Chen et al., NeurIPS 2023"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    wait_free: ClassVar[bool] = True

    lam_g: float = setting(0.05, "λ_G, weight of the spectral term in the generic phase", least=0)
    lam_p: float = setting(0.01, "λ_p, weight of the spectral term in the personal phase", least=0)
    tau: float = setting(0.4, "τ, share of the spectrum that the generic phase looks at", above=0, most=1)
    generic_epochs: int = setting(1, "E_G, epochs of the generic phase", least=0)
    personal_epochs: int = setting(3, "E_p, epochs of the personal phase", least=0)
    personal_lr: float = setting(0.0, "learning rate of the personal phase; 0: the experiment's", least=0)
    divergence: Literal["generalised", "normalised", "paper"] = setting("generalised", "the form of D")
    transform: Literal["ortho", "raw"] = setting("ortho", "the scaling of the DFT")

    def init_client(self, task: Task, params: Params) -> Tree:
        """w_p = w⁰."""
        return {"personal": params}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w_G from the download, w_p from where it was."""
        return {"params": down["params"], "personal": memory["personal"]}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The generic model, then the personal one."""
        return (
            Phase(epochs=self.generic_epochs, model="params", loss=self.generic_loss, enter=self.hold_personal),
            Phase(
                epochs=self.personal_epochs, model="personal", loss=self.personal_loss, lr=self.personal_lr or None,
                enter=self.hold_generic,
            ),
        )  # fmt: skip

    def hold_personal(self, task: Task, local: Tree) -> Tree:
        """s(w_p), which stays as it is while w_G trains."""
        return self.held(task, local, "personal", self.lam_g)

    def hold_generic(self, task: Task, local: Tree) -> Tree:
        """s(w_G), as it was trained."""
        return self.held(task, local, "params", self.lam_p)

    def held(self, task: Task, local: Tree, name: str, lam: float) -> Tree:
        """Return `local` with the spectrum of one of its models, which a phase needs in every step and never changes."""
        if lam == 0:
            return local
        return {**local, "spectrum": terms.spectrum(task.trainable(local[name]), self.transform)}

    def generic_loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w_G) + λ_G·D(ŝ(w_G) ‖ ŝ(w_p))."""
        return self.fit(task, params, batch) + self.penalty(task, params, local, self.lam_g, self.tau)

    def personal_loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w_p) + λ_p·D(s(w_p) ‖ s(w_G))."""
        return self.fit(task, params, batch) + self.penalty(task, params, local, self.lam_p, 1.0)

    def penalty(self, task: Task, params: Params, local: Tree, lam: float, share: float) -> Tensor | float:
        """Return λ·D from the other model's spectrum, without any work where λ is 0."""
        if lam == 0:
            return 0.0
        return lam * terms.spectral(task.trainable(params), local["spectrum"], share, self.divergence, self.transform)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_G goes up, w_p stays."""
        return {"params": local["params"]}, {"personal": local["personal"]}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """w_p, or the generic model for a client that never took part."""
        return tree.where(task.seen, memory["personal"], down["params"])
