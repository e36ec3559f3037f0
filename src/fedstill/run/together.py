"""Several runs side by side as one stack: other seeds, or other values of one hyper-parameter, are one more axis.

Every run keeps its own server, history and folder, and each coordinator runs as if it were alone. What is done together is the
clients' work. The results are those of separate runs, to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..core.errors import CannotStack, TrainingError, first_line
from ..data import Federation
from ..engine.hooks import reads_values
from ..engine.stage import say
from ..server.coordinator import Callback
from . import legal
from .callbacks import Progress
from .experiment import Experiment
from .result import Run
from .session import Session, Start, Transports, start, varying
from .signals import Stop, listening
from .simulation import begin


def run_together(
    experiments: Sequence[Experiment],
    *,
    outs: Sequence[str | Path | None] | None = None,
    progress: Progress | None = None,
    federations: Sequence[Federation | None] | None = None,
    transport: Transports | None = None,
) -> list[Run]:
    """Run experiments that differ in their seeds, in floating fields of their methods or in lr only, as one stack.

    Where they cannot go together (the engine is not stacked, a method branches on the value) they are run one after another,
    with one line that says why. `progress` is given the last one's records. Where one cannot go on, the others are run to their
    ends before `TrainingError` says so.
    """
    legal.check_runs(experiments, outs, federations, progress)
    follow = [None] * (len(experiments) - 1) + [progress]
    return _all_or_raise(
        try_together(experiments, outs=outs, progress=follow, federations=federations, transport=transport)
    )


def try_together(
    experiments: Sequence[Experiment],
    *,
    outs: Sequence[str | Path | None] | None = None,
    progress: Sequence[Progress | None] | None = None,
    federations: Sequence[Federation | None] | None = None,
    begins: Callable[[Sequence[int]], None] | None = None,
    transport: Transports | None = None,
    resume: bool = False,
    callbacks: Sequence[Sequence[Callback]] | None = None,
    final: bool = True,
) -> list[Run | TrainingError]:
    """Run as `run_together` does, with a progress function for each run; a run that fails is replaced by its error.

    `begins` is called with the numbers of the runs that begin, each time some do. With `resume`, folders that hold these
    experiments are continued, all from the same round. Without `final` the states after the last round are not kept.
    """
    none = [None] * len(experiments)
    starts: list[Start] = []
    try:
        for experiment, folder, federation, follow, others in zip(
            experiments, outs or none, federations or none, progress or none, callbacks or [()] * len(none), strict=True
        ):
            one = begin(
                experiment,
                out=folder,
                federation=federation,
                progress=follow,
                resume=resume,
                transport=transport,
                callbacks=others,
            )
            starts.append(dataclasses.replace(one, final=final))
        with listening(all(one.journal is not None for one in starts)) as stop:
            return _run(dict(enumerate(starts)), begins or (lambda numbers: None), transport, stop)
    finally:
        for one in starts:
            if one.journal is not None:
                one.journal.release()


def run_starts(starts: Sequence[Start], transport: Transports | None = None) -> list[Run]:
    """Run all to their ends. Raises `CannotStack` before the first round where they cannot go together."""
    return _all_or_raise(attempt(starts, transport))


def attempt(
    starts: Sequence[Start], transport: Transports | None = None, stop: Stop | None = None
) -> list[Run | TrainingError]:
    """Run all side by side; what goes wrong in the first round of several is a reason why they cannot."""
    session = start(starts, transport, stop)
    first = session.coordinators[0].state.round
    try:
        return session.run()
    except ConnectionError:  # a rank of the cluster is lost, for all runs
        raise
    except Exception as error:
        if len(starts) > 1 and all(c.state.round == first for c in session.coordinators):
            raise CannotStack(_reason(session, error)) from error
        if isinstance(error, TrainingError):
            return [error] * len(starts)  # whose work it was is not known
        raise


def _reason(session: Session, error: Exception) -> str:
    sims = [one.simulation for one in session.starts]
    varied = varying(sims)
    if varied and reads_values(error):
        return f"{sims[0].method.id} branches on {' or '.join(varied)}"
    return first_line(error)


def _run(
    starts: Mapping[int, Start],
    begins: Callable[[Sequence[int]], None],
    transport: Transports | None,
    stop: Stop | None = None,
) -> list[Run | TrainingError]:
    """Run all together; where that cannot be, those that differ in their seeds only; where that cannot be, one by one."""
    begins(list(starts))
    try:
        return attempt(list(starts.values()), transport, stop)
    except CannotStack as why:
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, one in starts.items():
            training = dataclasses.replace(one.simulation.training, seed=0)
            groups.setdefault((one.simulation.method, training), []).append(number)
        by_seed = 1 < len(groups) < len(starts)
        if len(starts) > 1:
            say(f"the runs go one after another{', seeds together' if by_seed else ''}: {why}")
        results: dict[int, Run | TrainingError] = {}
        for numbers in groups.values() if by_seed else [[number] for number in starts]:
            subset = {number: starts[number] for number in numbers}
            if by_seed:
                results |= zip(numbers, _run(subset, begins, transport, stop), strict=True)
                continue
            begins(numbers)
            results |= zip(numbers, attempt(list(subset.values()), transport, stop), strict=True)
        return [results[number] for number in starts]


def _all_or_raise(results: Sequence[Run | TrainingError]) -> list[Run]:
    """Return the runs, where none has failed."""
    for run in results:
        if isinstance(run, TrainingError):
            raise run
    return [run for run in results if not isinstance(run, TrainingError)]
