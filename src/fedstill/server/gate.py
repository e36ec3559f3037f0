"""The gate: every reply is checked before any method sees it. One bad client is refused and named; the round goes on.

    reports     every number a number, and possible: whole where it counts something, no more right answers than samples, no more
                steps than the client's samples make, the number of samples that is registered; where none is registered, whole,
                above 0, and at most `max_share` of the round's sum
    forms       names, shapes and dtypes of all entries, against what the method's own `finish` gives on an example
    magnitudes  every number finite, buffers too, and the norm of an upload one whose square float32 can hold (1.8e19): a larger
                one is finite and ends the run a round later. One pass over the data finds both. No running variance below 0
    bounds      the norm of an upload's difference from what was sent, where `max_norm` says so

A client that itself reports that its training has diverged stops the run, or is refused: as the setting `on_divergence` says.
A robust merge (`server.robust`) is for what passes: numbers that are possible and wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core import tree
from ..core.errors import TrainingError, shorten
from ..core.method import Method
from ..core.protection import Acceptance
from ..core.task import Site, Task
from ..core.tree import Tree
from ..transport.messages import Reply

TOO_LARGE = "its upload holds numbers that are too large"
NOT_FINITE = "its upload holds numbers that are not finite"
VARIANCE = "running_var"  # of torch's BatchNorm
REPORTED = ("loss", "steps")  # numbers that every reply to an order to train must have
NEEDED = (*REPORTED, "tests", "downloaded", "trained")  # where training is watched
LARGEST = math.sqrt(torch.finfo(torch.float32).max)
NAME = 60  # signs of a client's name in a line
WHOLE = 2**53  # up to here a float holds every whole number
NUMBERS = 64  # most numbers of a report
SMALL = 1 << 20  # bytes of a message beside its tensors
DEEP = 32  # most branches within one another
NEEDS = {  # numbers of the replies to other orders
    "score": ("samples",),
    "idle": REPORTED,
    "tune": (*REPORTED, "before", "after", "samples"),
    "state": ("last",),
}
COUNTS = frozenset(  # numbers of a report that count something
    {"steps", "samples", "tests", "personal", "generic", "before", "after", "downloaded", "trained"}
    | {"last", "undecided", "undecided_last", "begun", "personal_steps"}
)
RIGHT = {  # right answers, and the samples of which they are
    **dict.fromkeys(("personal", "generic", "before", "after"), "samples"),
    **dict.fromkeys(("downloaded", "trained"), "tests"),
}
Spec: TypeAlias = dict[str, tuple[torch.Size, torch.dtype | None]]  # of an upload's entries, by their full names
Reasons: TypeAlias = dict[int, str]  # why replies are refused, by client


def example_upload(method: Method, task: Task, down: Tree) -> Tree:
    """Return what a client that was sent `down` would upload without having trained, on example data of one class."""
    x = task.net.example
    count = torch.tensor(float(len(x)), dtype=task.net.dtype, device=x.device)
    never = torch.zeros((), dtype=torch.float64, device=x.device)
    y, index = task.objective.example(len(x), count), torch.arange(len(x), device=x.device)
    task = task.at_site(Site(x, y, index, count, torch.ones_like(count), never))
    with torch.no_grad():
        memory = tree.fit_rows(method.init_client(task, task.net.initial()), method.per_sample, len(x))
        up, _ = method.finish(task, down, memory, method.begin(task, down, memory))
    return up


def spec_of(upload: Tree) -> Spec:
    """Return the shape and dtype of every entry; an empty branch is an entry without a dtype.

    Raises `ValueError` where it is no tree of plain tensors: the message says what is wrong, of an upload.
    """
    return dict(_entries(upload, "", 0))


def _entries(branch: Any, prefix: str, depth: int) -> Iterator[tuple[str, tuple[torch.Size, torch.dtype | None]]]:
    if not isinstance(branch, dict):
        raise ValueError("its upload is no tree of tensors")
    if depth > DEEP:
        raise ValueError(f"its upload has more than {DEEP} branches within one another")
    if not branch and prefix:
        yield prefix, (torch.Size(), None)
    for name, leaf in branch.items():
        if not isinstance(name, str) or tree.SEPARATOR in name:
            raise ValueError(f"its upload has an entry with the name {_shown(name)}")
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_meta or leaf.requires_grad:
                raise ValueError(f"{prefix}{name} is no plain tensor")
            yield prefix + name, (leaf.shape, leaf.dtype)
        elif isinstance(leaf, dict):
            yield from _entries(leaf, f"{prefix}{name}{tree.SEPARATOR}", depth + 1)
        else:
            raise ValueError(f"{prefix}{name} is no tensor")


def _form_of(branch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of the shapes and dtypes of a sound upload's tensors."""
    return {
        name: _form_of(leaf) if isinstance(leaf, dict) else (leaf.shape, leaf.dtype) for name, leaf in branch.items()
    }


def _alike(branch: Any, form: dict[str, Any]) -> bool:
    """Return whether an upload is a tree of plain tensors of this form: the same answer as by `spec_of`, sooner."""
    if type(branch) is not dict or branch.keys() != form.keys():
        return False
    for name, leaf in branch.items():
        right = form[name]
        if type(right) is dict:
            sound = _alike(leaf, right)
        else:
            sound = type(leaf) is Tensor and (leaf.shape, leaf.dtype) == right and leaf.layout is torch.strided
            sound = sound and not (leaf.is_meta or leaf.requires_grad)
        if not sound:
            return False
    return True


@dataclass
class Gate:
    """Refuses replies that a method must not see. `expected` is what was right last, in `round`.

    `varies` says that uploads have another form from round to round (`Method.upload_varies`); else an upload that is as the last
    right one is right.
    """

    varies: bool = False
    refuse_diverged: bool = False  # whether a client whose own training diverged is refused, else it stops the run
    samples: Sequence[int] = ()  # training samples of each client, where they are registered
    max_share: float = 1.0  # of a round's samples, of a client whose number is not registered
    max_norm: float = 0.0  # of an upload's difference from what was sent; 0: any
    clip: bool = False  # whether an upload above it is clipped, else it is refused
    most_bytes: int = 0  # that a reply may have on the wire; 0: by the size of a right upload
    variances: tuple[str, ...] = ()  # names of running variances, where uploads are models
    counted: bool = True  # whether scores are numbers of right answers
    names: Sequence[str] = ()  # of the clients, where they have names
    expected: Spec | None = field(default=None, init=False)
    _form: dict[str, Any] | None = field(default=None, init=False)  # the same as a tree, for a quick comparison
    size: int = field(default=0, init=False)  # bytes of an upload of the form expected
    round: int = field(default=0, init=False)
    lost: Reasons = field(default_factory=dict, init=False)  # divergences since one client's training did not
    wrong: Reasons = field(default_factory=dict, init=False)  # uploads of a wrong form before the first right one

    @classmethod
    def of(
        cls,
        settings: Acceptance,
        method: Method,
        samples: Sequence[int],
        buffers: Sequence[str],
        counted: bool = True,
        names: Sequence[str] = (),
    ) -> Gate:
        """Return the gate that a run asks for, given the registered numbers of samples and the names of a model's buffers."""
        clip, refuse = settings.over_norm == "clip", settings.on_divergence == "refuse"
        most = int(settings.max_upload * 2**20)
        variances = tuple(name for name in buffers if name.split(".")[-1] == VARIANCE and method.averages)
        share, norm = settings.max_share, settings.max_norm
        return cls(method.upload_varies, refuse, samples, share, norm, clip, most, variances, counted, names)

    def who(self, client: int) -> str:
        """Return which client is meant, in words: its number, and its name where it has one."""
        return f"client {client}" + (f" ({shorten(self.names[client], NAME)})" if client < len(self.names) else "")

    # ---- reports -----------------------------------------------------------------------------------------------------
    def reports(
        self, replies: Sequence[Reply], needed: Collection[str] = REPORTED, steps: Mapping[int, int] | None = None
    ) -> Reasons:
        """Return what is wrong with the reports of replies to orders to train; `steps` are the most that clients can make."""
        reasons = {}
        for reply in replies:
            known = reply.client < len(self.samples)
            registered = {"samples": int(self.samples[reply.client])} if known else {}
            reason = misreported(reply.report, needed if known else {*needed, "samples"}, registered, self.counted)
            if not reason and steps is not None and reply.report["steps"] > steps.get(reply.client, WHOLE):
                reason = f"it reports {reply.report['steps']:g} steps; {steps[reply.client]} are the most it can make"
            if not reason and reply.report.get("samples") == 0:
                reason = "it reports 0 samples"
            if reason:
                reasons[reply.client] = reason
        return reasons

    def diverged(self, task: Task, replies: Sequence[Reply]) -> Reasons:
        """Return how the training of clients has diverged, by their own reports; it stops the run, unless these are refused."""
        reasons = {reply.client: reason for reply in replies if (reason := divergence(reply))}
        if reasons and not self.refuse_diverged:
            client, reason = next(iter(reasons.items()))
            at = next(reply.round for reply in replies if reply.client == client)
            raise TrainingError(f"round {at}, {self.who(client)}: {reason}; {_advice(task)}")
        return reasons

    def go_on(self, task: Task, lost: Reasons, replies: int, clients: int) -> None:
        """Stop the run where training diverges everywhere (`lost` of so many replies): that of a whole round, of three clients
        or more, or that of more than half of all `clients` one after another.
        """
        if len(lost) < replies:
            self.lost.clear()
        elif lost:
            self.lost |= lost
            if len(lost) >= 3 or 2 * len(self.lost) > clients:
                client, reason = next(iter(lost.items()))
                who = f"all {len(self.lost)} clients" if len(self.lost) > 1 else "the only client"
                why = f"the training of {who} diverged ({self.who(client)}: {reason})"
                raise TrainingError(f"round {task.round}: {why}; {_advice(task)}")

    def shares(self, replies: Sequence[Reply], registered: Sequence[int] | None = None) -> Reasons:
        """Return which clients claim too large a share of the samples; those whose number is registered only count in the sum.

        The largest claim goes first, and the others are compared without it. Several that claim alike cover one another: only
        registration is certain.
        """
        sizes = self.samples if registered is None else registered
        doubtful = {reply.client: reply.report["samples"] for reply in replies if reply.client >= len(sizes)}
        if not doubtful or self.max_share >= 1:
            return {}
        total = sum(sizes[r.client] for r in replies if r.client < len(sizes)) + sum(doubtful.values())
        reasons, others = {}, len(replies)
        while doubtful and others > 1:
            client = max(doubtful, key=lambda k: doubtful[k])
            claim = doubtful.pop(client)
            if claim <= self.max_share * total:
                break
            reasons[client] = (
                f"it reports {claim:g} samples, {claim / total:.0%} of the round's; {self.max_share:.0%} is the most"
            )
            total, others = total - claim, others - 1
        return reasons

    # ---- uploads -----------------------------------------------------------------------------------------------------
    def inspect(self, replies: Sequence[Reply], example: Callable[[Reply], Tree]) -> tuple[list[Reply], Reasons]:
        """Divide replies into those that may be merged and the reasons, by client, for which the others are refused.

        `example(reply)` makes an upload that would be right in that reply's round; it is asked for only where a reply differs
        from what was right before.
        """
        reasons = {reply.client: reason for reply in replies if (reason := self._mismatch(reply, example))}
        if self.expected is None:
            self.wrong |= reasons
        checked = [reply for reply in replies if reply.client not in reasons]
        for reply, norm in zip(checked, tree.norms([reply.up for reply in checked]), strict=True):
            if not norm <= LARGEST:
                reasons[reply.client] = too_large(reply.up)
        reasons |= self.negative([reply for reply in checked if reply.client not in reasons])
        reasons |= self.shares([reply for reply in checked if reply.client not in reasons])
        return [reply for reply in checked if reply.client not in reasons], reasons

    def negative(self, replies: Sequence[Reply]) -> Reasons:
        """Return which uploads hold a running variance below 0, whose square root no model has: one read for all of them."""
        names = [name for name in self.variances if replies and name in replies[0].up.get("params", {})]
        if not names:
            return {}
        least = [torch.stack([reply.up["params"][name] for reply in replies]).flatten(1).amin(1) for name in names]
        lines = zip(replies, torch.stack(least, 1).tolist(), strict=True)
        wrong = {r.client: [n for n, value in zip(names, row, strict=True) if value < 0] for r, row in lines}
        return {client: f"params|{bad[0]} holds a variance below 0" for client, bad in wrong.items() if bad}

    def bounded(
        self, replies: Sequence[Reply], down: Mapping[int, Tree], names: Collection[str]
    ) -> tuple[list[Reply], Reasons, dict[int, float]]:
        """Bound the norm of uploads' differences from what was sent; return (replies, reasons, norms of those that are clipped).

        The norm is that of the trainable parameters (`names`) that went down and came up. What is clipped is moved towards
        what was sent, by one factor for these parameters and for the floating buffers beside them, so that statistics stay
        those of a model on the way between the two. Entries that were not sent as "params", whole numbers, and what the client
        keeps stay as they are; so methods with entries that must agree with the server's state (`Method.coupled`) cannot clip.
        """
        kept: list[Reply] = []
        reasons: Reasons = {}
        clipped: dict[int, float] = {}
        for reply in replies:
            sent = down[reply.client].get("params", {})
            up = {name: value for name, value in reply.up.get("params", {}).items() if name in sent}
            moved = [torch.linalg.vector_norm(v.double() - sent[n].double()) for n, v in up.items() if n in names]
            norm = float(torch.linalg.vector_norm(torch.stack(moved))) if moved else 0.0
            if norm <= self.max_norm:
                kept.append(reply)
            elif not self.clip:
                reasons[reply.client] = (
                    f"its upload is {norm:.4g} away from what was sent; {self.max_norm:g} is the most"
                )
            else:
                near = {
                    name: (sent[name] + (value - sent[name]) * (self.max_norm / norm)).to(value.dtype)
                    for name, value in up.items()
                    if value.is_floating_point()
                }
                clipped[reply.client] = norm
                kept.append(dataclasses.replace(reply, up={**reply.up, "params": {**reply.up["params"], **near}}))
        return kept, reasons, clipped

    def hopeless(self, unread: Reasons, clients: int) -> str:
        """Return what is wrong where more than half of all clients sent a wrong form (or `unread`), and nobody a right one."""
        if self.expected is not None:
            return ""
        self.wrong |= unread
        client, reason = next(iter(self.wrong.items()), (0, ""))
        return f"{self.who(client)}: {reason}" if 2 * len(self.wrong) > clients else ""

    def _mismatch(self, reply: Reply, example: Callable[[Reply], Tree]) -> str:
        same = not self.varies or reply.round == self.round
        if same and self._form is not None and _alike(reply.up, self._form):
            return ""
        try:
            spec = spec_of(reply.up)
        except ValueError as error:
            return str(error)
        if same and spec == self.expected:
            return ""
        right = spec_of(example(reply))
        if spec == right:
            self.expected, self.round, self._form = spec, reply.round, _form_of(reply.up)
            self.size = sum(leaf.nbytes for _, leaf in tree.leaves(reply.up))
            return ""
        return difference(spec, right)


def misreported(
    report: Any, needed: Collection[str], registered: Mapping[str, int] | None = None, counted: bool = True
) -> str:
    """Return what is wrong with the numbers of a reply; a loss that is huge or NaN is not: it says that training diverged.

    `counted` says whether scores are numbers of right answers; else they are sums of shares or errors.
    """
    if not isinstance(report, dict) or len(report) > NUMBERS:
        return f"its report is no table of at most {NUMBERS} numbers"
    for name in needed:
        if name not in report:
            return f"its report has no {name}"
    for name, value in report.items():
        if type(value) is float and name in COUNTS and 0.0 <= value <= WHOLE and value.is_integer():
            continue  # as most are
        if not isinstance(name, str):
            return f"its report names a number {_shown(name)}"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        possible = number and (name == "loss" or -WHOLE <= value <= WHOLE)
        if name in COUNTS:
            possible = possible and value >= 0 and (value == int(value) or (name in RIGHT and not counted))
        if name == "finite":
            possible = possible and value in (0, 1)
        if not possible:
            return f"it reports {_shown(value)} {name}"
    for name, count in (registered or {}).items():
        if report.get(name, count) != count:
            return f"it reports {report[name]:g} {name}; {count} are registered"
    for name, of in RIGHT.items() if counted else ():
        if name in report and of in report and report[name] > report[of]:
            return f"it reports {report[name]:g} right answers ({name}) of {report[of]:g} samples"
    return ""


def model_of(upload: Tree, right: Spec) -> str:
    """Return what is wrong with a reply that should be a model of this form; else ""."""
    try:
        wrong = difference(spec_of(upload), right)
    except ValueError as error:
        return str(error)
    return wrong or ("" if tree.norms([upload])[0] <= LARGEST else too_large(upload))


def state_of(upload: Tree, memory: Spec, per_sample: Collection[str]) -> str:
    """Return what is wrong with a reply that should be what is kept for a client, whose memory is of this form; else "".

    Its numbers may be anything: they are the client's own. Entries with a row for each sample may have any number of rows.
    """
    try:
        specs = {part: spec_of(upload.get(part, {})) for part in ("memory", "undecided", "begun")}
        spec_of(upload)
    except (ValueError, AttributeError) as error:
        return str(error)
    right, own = (
        {name: form for name, form in spec.items() if name.split(tree.SEPARATOR)[0] not in per_sample}
        for spec in (memory, specs["memory"])
    )
    if own and (wrong := difference(own, right)):
        return wrong
    strange = {name for name, spec in specs["undecided"].items() if right.get(name, spec) != spec}
    strange |= upload.keys() - specs.keys()
    return f"{min(strange)[:100]} does not belong into its state" if strange else ""


def divergence(reply: Reply) -> str:
    """Return in words how a client reports that its own training has diverged; else ""."""
    loss = reply.report.get("loss", 0.0)
    if not abs(loss) <= WHOLE:
        return f"the training loss is {_shown(loss)}"
    return "" if reply.report.get("finite", 1.0) else "weights are no longer finite"


def difference(spec: Spec, right: Spec) -> str:
    """Return the first difference between an upload and what is right, in words."""
    for name, (shape, dtype) in right.items():
        if name not in spec:
            return f"{name} is missing from its upload"
        if spec[name][0] != shape:
            return f"{name} has shape {tuple(spec[name][0])} instead of {tuple(shape)}"
        if spec[name][1] != dtype:
            return f"{name} has dtype {_plain(spec[name][1])} instead of {_plain(dtype)}"
    extra = [name for name in spec if name not in right]
    return f"{extra[0][:100]} does not belong into its upload" if extra else ""


def too_large(upload: Tree) -> str:
    """Return in words what is wrong with an upload whose norm is not at most `LARGEST`."""
    finite = all(bool(torch.isfinite(leaf).all()) for _, leaf in tree.leaves(upload))
    return f"{TOO_LARGE}: their norm is above {LARGEST:.2g}" if finite else NOT_FINITE


def in_a_line(reason: str) -> str:
    """Return a reason, which may hold names that a client has made up, as one short line."""
    return " ".join(reason.split())[:300]


def _advice(task: Task) -> str:
    return f"a smaller lr (now {task.lr:g}) usually helps"


def _plain(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(value: object) -> str:
    """Return a value in a few characters, whatever it is."""
    if isinstance(value, bool | None) or (isinstance(value, str) and len(value) <= 20):
        return repr(value)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**300):
        return f"{value:g}"
    return f"a {type(value).__name__}"
