"""Two workers on two cores: one thread each, so that they do not wait for one another. And what many tests watch with."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FEDSTILL_RUNS"] = "none"  # a run without --out leaves nothing; tests of the default remove this

import pytest
import torch

from fedstill.run import session

from .problems import SETTINGS, Spy

torch.set_num_threads(1)
# A shell has commands in the background ignore interrupts, and nohup has them ignore SIGHUP; tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

SLOW = {  # files that `--quick` leaves out; of the laws and the system tests it takes those below
    "test_accounting", "test_async", "test_baselines_a", "test_channels", "test_data_manager", "test_data_papers", "test_fused",
    "test_gate", "test_journal", "test_library_models",
    "test_model_store", "test_models", "test_models_images", "test_papers", "test_parts", "test_pool", "test_program",
    "test_rules",
    "test_scores", "test_testing", "test_time", "test_together", "test_wait_free", "test_winograd",
}  # fmt: skip
QUICK = (
    "test_1_stacked_equals_one[plain-", "test_3_neutral_values_give_the_parent[one-", "test_the_books_agree[one-everything-",
    "test_every_number_and_model_is_the_same[pfedsd]", "test_every_number_and_model_is_the_same[scaffold]",
    "test_a_round_runs_through_few_files",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a minute's worth of the suite: `make quick`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    taken = [
        item
        for item in items
        if (item.path.parent.name == "unit" and item.path.stem not in SLOW) or item.name.startswith(QUICK)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(taken)])
    items[:] = taken


@pytest.fixture(autouse=True, scope="session")
def _decoded(tmp_path_factory):
    """No test writes decoded samples into the user's cache."""
    os.environ["FEDSTILL_CACHE"] = str(tmp_path_factory.mktemp("decoded"))


@pytest.fixture
def spied(monkeypatch):
    """Every reply that passes, each with what its client keeps; a run that names no transport is carried by `spied.transport`."""
    spy = Spy()
    monkeypatch.setattr(session, "LocalTransport", spy.transport)
    return spy


@pytest.fixture
def traced(monkeypatch):
    """Runs with the shared settings trace their stacked phases, as on a GPU, but on a CPU and without graphs."""
    monkeypatch.setitem(SETTINGS, "compile", "traced")
