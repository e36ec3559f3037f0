"""The sentences at the top: which method is best, whether that is shown, and for how many clients federation pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...run.evaluate import Evaluation
from ..significance import Differences
from ..verdict import Verdict, counts
from .markup import Html, escape, join, tag
from .read import Study

NAMED = 4  # methods that a sentence names


def answer(study: Study, tested: Differences | None, found: Mapping[str, list[Verdict]], label: str) -> Html:
    """Return the sentence that answers, and what follows it; `label` is the method that the verdicts are about."""
    return join(
        [
            tag("p", _best(study, tested), cls="answer"),
            *(
                [tag("p", _client_by_client(study, tested), cls="answer second")]
                if tested and not _usual(study)
                else []
            ),
            *([tag("p", _served(study, found, label), cls="answer second")] if label in found else []),
        ]
    )


def _usual(study: Study) -> bool:
    """Return whether the score is by the default contract, which needs no other words than accuracy."""
    return study.contract == Evaluation()


def _best(study: Study, tested: Differences | None) -> Html:
    best = study.best
    stat = study.score(best) or study.personal(best)
    measure = study.measure
    over = f" ± {measure.text(stat.spread, 1)}" if stat.spread is not None and study.seeds > 1 else ""
    name = join([tag("strong", "Training alone"), f" ({best})"]) if best == study.local else tag("strong", best)
    number = f"{measure.text(stat.value, 1)}{over}{' %' if measure.share else ''}"
    if not _usual(study):
        words = "has the best score," if len(study.runs) > 1 else "scores"
        return join([name, f" {words} {number}: {study.contract}."])
    what = f"{number} accuracy" if measure.share else f"{measure.indefinite} of {number}"
    reached = join([name, f" serves the clients with {what} on average"])
    if tested is None:
        worst = study.mean(best, "personal_worst")
        return join(
            [
                reached,
                f", the worst tenth of them with {worst.text(measure) if not measure.share else f'{100 * worst.value:.1f} %'}."
                if worst
                else ".",
            ]
        )
    alike = [label for label in study.labels[1:] if not tested.between(best, label).significant]
    second = study.labels[1]
    ahead = measure.factor * measure.rank(tested.between(best, second).gain)
    lead = (
        f"{ahead:.1f} points more than" if measure.share else f"{ahead:.4g} {'less' if measure.lower else 'more'} than"
    )
    if not alike:
        return join(
            [
                reached,
                f", {lead} {second}, the next; the difference to every other is significant.",
            ]
        )
    if len(alike) == len(study.labels) - 1:
        others = "the other" if len(alike) == 1 else f"any of the {len(alike)} others"
        return join([reached, f"; these runs do not show that it differs from {others if len(alike) > 1 else second}."])
    beaten, more = len(study.labels) - 1 - len(alike), "more" if measure.share else "better"
    others = f"{beaten} of the {len(study.labels) - 1} others; {_listed(alike)} may be as good."
    return join([reached, f", significantly {more} than {others}"])


def _client_by_client(study: Study, tested: Differences) -> str:
    """Return how the best score's method stands to the others where clients are compared one by one, which may differ."""
    pairs = {label: tested.between(study.best, label) for label in study.labels[1:]}
    rank = study.tested_by.rank
    sides = {
        "significantly better than": [label for label, d in pairs.items() if d.significant and rank(d.gain) > 0],
        "significantly worse than": [label for label, d in pairs.items() if d.significant and rank(d.gain) < 0],
        "not shown to differ from": [label for label, d in pairs.items() if not d.significant],
    }
    stands = ", ".join(f"{words} {_listed(labels)}" for words, labels in sides.items() if labels)
    return f"Client by client ({study.compared}) it is {stands}."


def _listed(labels: Sequence[str]) -> str:
    shown = [*labels[:NAMED]] if len(labels) <= NAMED else [*labels[: NAMED - 1], f"{len(labels) - NAMED + 1} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _served(study: Study, found: Mapping[str, list[Verdict]], label: str) -> Html:
    of = counts(found[label])
    total = len(found[label])
    seeds = len({one.seed for one in found[label]})
    unit = "clients" if seeds == 1 else f"clients ({total / seeds:g} in each of {seeds} seeds)"
    worse = tag("strong", f"{of['stay local'] or 'none'} worse", cls="stay")
    better = tag("strong", f"{of['join']} of {total} {unit} better", cls="join")
    left = f"; for {of['undecided']} their own test samples do not decide." if of["undecided"] else "."
    name = "It" if label == study.best and _usual(study) else label
    return join([escape(name), " serves ", better, " than training alone and ", worse, left])
