"""Settings: checked where they enter, complete in TOML, defaults in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedstill as fs
from fedstill import methods
from fedstill.core.settings import fields_of


@pytest.mark.parametrize("name", methods.METHODS)
def test_toml_is_complete_and_reads_back(name: str, tmp_path: Path) -> None:
    experiment = fs.Experiment(
        method=methods.get(name)(), lr=1e-5, head=("fc1", 'odd"\\name'), data="some/path", nesterov=True
    )
    text = experiment.to_toml()
    for field in [*fields_of(fs.Experiment), *fields_of(methods.get(name))]:
        assert f"\n{field.name} = " in "\n" + text
    (tmp_path / "e.toml").write_text(text)
    assert fs.Experiment.from_toml(tmp_path / "e.toml") == experiment


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"participation": 0}, "participation = 0"),
        ({"participation": 1.5}, "participation = 1.5"),
        ({"rounds": 0}, "rounds = 0"),
        ({"rounds": 2.5}, "rounds = 2.5: should be a whole number"),
        ({"rounds": True}, "rounds = True"),
        ({"lr": 0}, "lr = 0"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"lr": "fast"}, "lr = 'fast': should be a number"),
        ({"momentum": -0.1}, "momentum"),
        ({"seed": -1}, "seed"),
        ({"dtype": "float16"}, "float32, float64"),
        ({"engine": "vmap"}, "auto, one, stacked"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict, says: str) -> None:
    with pytest.raises(fs.InputError, match=says.replace("(", r"\(")) as error:
        fs.Training(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fs.PFedSD(lam=-1), "lam = -1"),
        (lambda: fs.PFedSD(tau=0), "tau = 0"),
        (lambda: fs.FedProx(mu=-0.5), "mu = -0.5"),
        (lambda: fs.FedAvg(mean="median"), "mean = 'median'"),
        (lambda: fs.FedRep(head_epochs=-1), "head_epochs = -1"),
        (lambda: fs.SCAFFOLD(server_lr=0), "server_lr = 0"),
    ],
)
def test_methods_check_their_fields(make, says: str) -> None:
    with pytest.raises(fs.InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("roundz = 3", "roundz = 3.*'rounds'"),
        ("[method]\nid = 'pfedsd'\nlamm = 3", "method.lamm = 3.*'lam'"),
        ("method = 'pfedds'", "'pfedds'.*'pfedsd'"),
        ("rounds = ", "valid TOML"),
        ("[method]\nlam = 3", "an 'id'"),
        ("rounds = '3'", "rounds = '3'"),
    ],
)
def test_bad_toml_names_the_nearest(toml: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(toml)
    with pytest.raises(fs.InputError, match=says):
        fs.Experiment.from_toml(tmp_path / "e.toml")


def test_simulate_refuses_unknown_keywords_with_the_nearest() -> None:
    with pytest.raises(fs.InputError, match="'rounds'"):
        fs.simulate(fs.FedAvg(), model=None, data=None, round=3)  # type: ignore[arg-type]
