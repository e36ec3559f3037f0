"""How a federation is trained, in groups of settings: federation, local training, server, machine, simulated time, scores.

Each group refuses values that are illegal together and names those of its fields that have no effect, given the others
(`unused`). `run.experiment.Training` inherits from all groups, so their fields are also the keywords of `simulate`, the keys of
experiment.toml and the flags of the command; it adds the checks across groups. A function that needs the settings of one group
takes an object of that group, so a `Training` can be passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .augment import Augment
from .errors import InputError
from .objective import read_weights
from .optim import Recipe
from .schedule import Schedule
from .settings import Group, setting

REAL = "real"  # the profile of a deployment: its clients are real, and so are the seconds
ONLY_SIMULATED = (  # what needs a profile of simulated devices
    "availability", "drop", "min_battery", "max_load", "min_memory", "deadline", "over_select", "late",
)  # fmt: skip
ONLY_TIMED = (*ONLY_SIMULATED, "mode", "wait_free")  # what needs a profile
ONLY_SYNCHRONOUS = (  # what needs rounds that end
    "min_battery", "max_load", "min_memory", "deadline", "over_select", "minimum", "late", "wait_free",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FederationSettings(Group):
    """The federation: how many rounds, who takes part in them, and how often everybody is scored."""

    rounds: int = setting(30, "communication rounds", least=1, group="federation")
    participation: float = setting(1.0, "share of the clients asked each round", above=0, most=1, group="federation")
    seed: int = setting(
        0,
        "seed of everything random: partition, weights, cohorts, batches, dropout",
        least=0,
        most=2**63 - 1,
        group="federation",
    )
    eval_every: int = setting(
        1, "score all clients every so many rounds, and after the last", least=1, group="federation"
    )
    sampler: str = setting(
        "uniform", "who is asked: uniform, size, available, power-of-choice, round-robin, poisson", group="federation"
    )
    candidates: int = setting(
        0, "power-of-choice: clients drawn, of whom those with the highest loss are asked; 0: twice as many", least=0,
        group="federation",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Adapters(Group):
    """What of the model trains, where not all of it does."""

    lora: str = setting(
        "",
        "train low-rank adapters of linear layers and attention, and the head: r=8,alpha=16,targets=query+value "
        "(all-linear where targets is left out); empty: the whole model",
        group="model",
    )


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Group):
    """What a client does with its own data in a round, where its method has no values of its own."""

    epochs: int = setting(5, "passes over its data that a client makes each round", least=1, group="local training")
    local_steps: int = setting(
        0, "SGD steps that a client makes each round instead, whatever its data; 0: by epochs", least=0,
        group="local training",
    )  # fmt: skip
    batch_size: int = setting(16, "samples a step; a client with fewer uses them all", least=1, group="local training")
    lr: float = setting(0.05, "learning rate η", above=0, group="local training")
    momentum: float = setting(
        0.9, "momentum of SGD; its state starts fresh each round", least=0, most=1, group="local training"
    )
    nesterov: bool = setting(False, "Nesterov's momentum", group="local training")
    weight_decay: float = setting(
        0.0, "weight decay: added to the gradient, of adamw apart from it", least=0, group="local training"
    )
    optimizer: Literal["sgd", "adam", "adamw"] = setting(
        "sgd", "the clients' optimiser; adam and adamw want a smaller lr, as 0.001", group="local training"
    )
    adam_beta1: float = setting(0.9, "β₁ of adam and adamw", least=0, most=0.999999, group="local training")
    adam_beta2: float = setting(0.999, "β₂ of adam and adamw", least=0, most=0.999999, group="local training")
    adam_eps: float = setting(1e-8, "ε of adam and adamw", above=0, group="local training")
    keep_optimizer: bool = setting(
        False,
        "clients keep the optimiser's state from round to round instead of starting afresh",
        group="local training",
    )
    clip_gradient: float = setting(
        0.0,
        "the longest gradient of a client's step, over all weights that move; 0: any",
        least=0,
        group="local training",
    )
    lr_schedule: Literal["constant", "step", "cosine"] = setting(
        "constant", "how learning rates fall after the warm-up", group="local training"
    )
    lr_schedule_over: Literal["rounds", "steps"] = setting(
        "rounds",
        "whether they change from round to round, or from step to step of a client's phase",
        group="local training",
    )
    warmup: int = setting(
        0, "rounds, or steps, in which learning rates rise to their values first", least=0, group="local training"
    )
    lr_step: int = setting(
        10, "lr_schedule step: rounds, or steps, after which rates fall", least=1, group="local training"
    )
    lr_decay: float = setting(
        0.1, "lr_schedule step: the factor by which they fall", above=0, most=1, group="local training"
    )
    augment: str = setting(
        "",
        "augment batches in training: crop:P,flip,cutout:S,jitter:A,mixup:α, or some of these",
        group="local training",
    )
    class_weights: str = setting(
        "none",
        "weights of the classes in the loss: none; balanced, by each client's own training samples; or numbers with commas",
        group="local training",
    )
    label_smoothing: float = setting(
        0.0, "share of a target that goes to all classes alike", least=0, most=1, group="local training"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise InputError("nesterov", True, "false, or a momentum above 0")
        Augment.parse(self.augment)
        read_weights(self.class_weights)

    def recipe(self) -> Recipe:
        """Return how local training makes its steps."""
        schedule = None
        if self.lr_schedule != "constant" or self.warmup:
            schedule = Schedule(self.lr_schedule, self.lr_schedule_over, self.warmup, self.lr_step, self.lr_decay)
        betas = self.adam_beta1, self.adam_beta2
        return Recipe(self.optimizer, *betas, self.adam_eps, self.clip_gradient, self.keep_optimizer, schedule)

    def unused(self) -> dict[str, str]:
        """Return the epochs where steps are counted, and the numbers of optimisers and schedules that are not chosen."""
        unused = super().unused() | ({"epochs": "with `local_steps`"} if self.local_steps else {})
        if self.optimizer == "sgd":
            unused |= dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps"), "without `optimizer` adam or adamw")
            if not self.momentum:
                unused["keep_optimizer"] = "without `momentum`: SGD has no other state"
        else:
            unused |= dict.fromkeys(("momentum", "nesterov"), f"with `optimizer` {self.optimizer}")
        if self.lr_schedule != "step":
            unused |= dict.fromkeys(("lr_step", "lr_decay"), "without `lr_schedule` step")
        if self.recipe().schedule is None:
            unused["lr_schedule_over"] = "without `lr_schedule` or `warmup`"
        return unused


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Group):
    """The server's step from the clients' mean."""

    server: Literal["mean", "momentum", "adam", "yogi"] = setting(
        "mean", "what the server makes of the clients' mean: the mean itself, or a step towards it", group="server"
    )
    server_lr: float = setting(
        0.0, "η of the server's step; 0: 1 for momentum, 0.01 for adam and yogi", least=0, group="server"
    )
    server_momentum: float = setting(0.9, "β₁ of the server's step", least=0, most=1, group="server")
    server_beta2: float = setting(0.99, "β₂ of adam's and yogi's step", least=0, most=1, group="server")
    server_tau: float = setting(1e-3, "τ of adam's and yogi's step", above=0, group="server")

    def unused(self) -> dict[str, str]:
        """Return the numbers of a step that this server does not make."""
        unused = super().unused()
        if self.server == "mean":
            names = ("server_lr", "server_momentum", "server_beta2", "server_tau")
            unused |= dict.fromkeys(names, "without `server`")
        if self.server == "momentum":
            unused |= dict.fromkeys(("server_beta2", "server_tau"), "with `server` momentum")
        return unused


@dataclass(frozen=True, kw_only=True)
class Machine(Group):
    """Where and how the work is computed; the numbers stay the same to rounding."""

    dtype: Literal["float32", "float64"] = setting("float32", "precision", group="machine")
    device: str = setting("auto", "cpu, cuda, cuda:1, …; auto takes a GPU where there is one", group="machine")
    engine: Literal["auto", "one", "stacked"] = setting(
        "auto", "train clients one by one, or stacked in one step; auto picks by device and model", group="machine"
    )
    cohort: int = setting(0, "clients stacked at once; 0: all of a round's that fit", least=0, group="machine")
    workers: int = setting(
        0,
        "processes that train clients one by one on a CPU; 0: one a core, at most a round's clients",
        least=0,
        group="machine",
    )
    fast: bool = setting(True, "use the fused and compiled fast paths (same numbers to rounding)", group="machine")
    bank: float = setting(
        0.0, "GiB of the GPU that clients' memories may take; the rest lies on the host, then on disk; 0: a quarter", least=0,
        group="machine",
    )  # fmt: skip
    compile: Literal["auto", "on", "off", "traced"] = setting(
        "auto", "compile the stacked step; auto: on a GPU, for runs of 2,000 steps or more", group="machine"
    )
    precision: Literal["tf32", "bf16", "full"] = setting(
        "tf32", "products of float32 numbers: TF32 where the GPU has it, bfloat16, or in full", group="machine"
    )

    def unused(self) -> dict[str, str]:
        """Return what belongs to the other engine or to another device."""
        unused = super().unused()
        if self.device == "cpu":
            unused["bank"] = "with `device` cpu"
        if self.engine == "one":
            unused |= dict.fromkeys(("cohort", "compile"), "with `engine` one")
        elif not self.fast:
            unused["compile"] = "without `fast`"
        if self.engine == "stacked":
            unused["workers"] = "with `engine` stacked"
        return unused


@dataclass(frozen=True, kw_only=True)
class Timing(Group):
    """Simulated time: the devices, when a round ends, and asynchronous and wait-free training."""

    profile: str = setting(
        "",
        "simulate time on these devices: uniform, lognormal:σ, file:devices.csv; empty: no simulated time; "
        "real: a deployment's own",
        group="time",
    )
    availability: float = setting(
        1.0, "share of the rounds in which a client can be asked", above=0, most=1, group="time"
    )
    drop: float = setting(0.0, "chance that a client drops out of a round", least=0, most=1, group="time")
    min_battery: float = setting(0.0, "a client refuses work below this charge", least=0, most=1, group="time")
    max_load: float = setting(1.0, "a client refuses work above this load", least=0, most=1, group="time")
    min_memory: float = setting(
        0.0, "a client refuses work below this share of free memory", least=0, most=1, group="time"
    )
    deadline: float = setting(
        0.0, "simulated seconds after which a round ends; 0: when all that answer have done so", least=0, group="time"
    )
    over_select: float = setting(
        1.0,
        "ask so many times the clients that are wanted, and take the first that answer",
        least=1,
        most=100,
        group="time",
    )
    minimum: int = setting(1, "replies below which a round is abandoned, the model unchanged", least=1, group="time")
    late: Literal["drop", "fold"] = setting(
        "drop", "replies that come too late: dropped, or merged in the round in which they arrive", group="time"
    )
    mode: Literal["sync", "fedasync", "fedbuff"] = setting(
        "sync", "merge round by round, each reply as it comes (FedAsync), or every so many (FedBuff)", group="time"
    )
    buffer: int = setting(
        0, "K, replies that FedBuff merges at a time; 0: 10, or all that are at work", least=0, group="time"
    )
    mixing: float = setting(0.6, "α, a fresh reply's share in FedAsync", above=0, most=1, group="time")
    staleness: Literal["constant", "hinge", "polynomial"] = setting(
        "polynomial", "how the weight of a reply falls that began with an older model", group="time"
    )
    staleness_a: float = setting(
        0.0, "a, its slope or power; 0: 10 for hinge, 0.5 for polynomial", least=0, group="time"
    )
    staleness_b: int = setting(4, "b, the staleness up to which hinge weighs in full", least=0, group="time")
    wait_free: Literal["off", "fixed", "until-download"] = setting(
        "off", "upload before personal training, which goes on meanwhile: for its usual steps, or until the next download",
        group="time",
    )  # fmt: skip
    personal_cap: int = setting(
        0, "the most personal steps until the next download; 0: no limit", least=0, group="time"
    )
    unselected: Literal["cap", "broadcast"] = setting(
        "cap", "personal training of clients that are not asked: up to the cap, or from a model sent to everybody each round",
        group="time",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "sync":
            self.require_defaults(ONLY_SYNCHRONOUS, f"with mode {self.mode!r}, which has no rounds that end")
        if not self.profile:
            self.require_defaults(ONLY_TIMED, f"without a profile of devices, as uniform (in a deployment: {REAL})")
        if self.profile == REAL:
            self.require_defaults(ONLY_SIMULATED, f"with profile {REAL!r}: only devices that are simulated have it")

    @property
    def simulates_time(self) -> bool:
        """Whether the run has a simulated clock."""
        return self.profile not in ("", REAL)

    def unused(self) -> dict[str, str]:
        """Return what belongs to late replies, to another mode, or to wait-free training until the next download."""
        unused = super().unused()
        if not self.deadline and self.over_select == 1:
            unused["late"] = "without `deadline` or `over_select`: nobody is late"
        if self.mode != "fedbuff":
            unused["buffer"] = "without `mode` fedbuff"
        if self.mode != "fedasync":
            unused["mixing"] = "without `mode` fedasync"
        if self.mode == "sync":
            names = ("staleness", "staleness_a", "staleness_b")
            unused |= dict.fromkeys(names, "without `mode` fedasync or fedbuff")
        elif self.staleness == "constant":
            unused["staleness_a"] = "without `staleness` hinge or polynomial"
        if self.mode != "sync" and self.staleness != "hinge":
            unused["staleness_b"] = "without `staleness` hinge"
        if self.wait_free != "until-download":
            unused |= dict.fromkeys(("personal_cap", "unselected"), "without `wait_free` until-download")
        return unused


@dataclass(frozen=True, kw_only=True)
class FurtherScores(Group):
    """What is scored beside each client's own test."""

    new: bool = setting(False, "score all clients' models together, owner of a sample unknown (New)", group="scores")
    averaged: bool = setting(
        False, "score the mean of the personal models of methods without a generic one", group="scores"
    )
    forgetting: bool = setting(
        False, "each round, score what participants download against what they had trained", group="scores"
    )
    train_scores: bool = setting(
        False,
        "score clients on their training data too: accuracy and cross-entropy (training-loss curves)",
        group="scores",
    )
    fine_tune: int = setting(0, "epochs that each client trains on after the federation (+FT)", least=0, group="scores")
    fine_tune_part: Literal["head", "all"] = setting("head", "what these epochs train", group="scores")
    newcomers: int = setting(0, "clients, by the seed, that join only after the federation", least=0, group="scores")
    join_epochs: int = setting(5, "epochs that a newcomer then trains on its own data", least=1, group="scores")
    metrics: tuple[str, ...] = setting(
        (),
        "metrics beside accuracy, with commas: f1, auroc, ece, rmse, … or a function of your own, FILE.py:NAME; "
        "empty: the usual ones of the objective",
        group="scores",
    )
    score_metric: str = setting(
        "", "the contract: which metric; empty: accuracy, or what the objective has in its place", group="scores"
    )
    score_model: Literal["personal", "generic", "fine-tuned", "new", "external", "averaged", "newcomers"] = setting(
        "personal", "the evaluation contract of tables, figures and summaries: which model", group="scores"
    )
    score_clients: Literal["all", "participants", "common"] = setting(
        "all", "the contract: whose test data; common: the common test set", group="scores"
    )
    score_mean: Literal["client", "sample", "training", "pooled"] = setting(
        "client", "the contract: what counts alike, clients, test samples or (a client's weight) training samples; pooled: the "
        "metric of all clients' predictions together", group="scores",
    )  # fmt: skip
    score_round: Literal["last", "mean10", "best-val", "best-test"] = setting(
        "last", "the contract: which round; mean10: mean of the last ten scored", group="scores"
    )
    patience: int = setting(
        0,
        "stop after so many scored rounds without a better score, and keep the best round's models; "
        "needs score_round best-val or best-test; 0: run all rounds",
        least=0,
        group="scores",
    )
    further_every: int = setting(
        0,
        "take New, External, averaged, +FT and newcomers every so many rounds too, into the records; 0: after the last",
        least=0,
        group="scores",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name.strip() for words in self.metrics for name in words.split(",")]
        object.__setattr__(self, "metrics", tuple(filter(None, names)))

    def unused(self) -> dict[str, str]:
        """Return what belongs to a score that is not asked for."""
        unused = super().unused()
        if not self.fine_tune:
            unused["fine_tune_part"] = "without `fine_tune`"
        if not self.newcomers:
            unused["join_epochs"] = "without `newcomers`"
        return unused
