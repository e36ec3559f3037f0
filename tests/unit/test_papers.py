"""The five papers' settings: every name and value is one of this library's, and nothing is missing."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase

import pytest

from fedstill import papers
from fedstill.core import settings
from fedstill.core.errors import InputError
from fedstill.data import partition
from fedstill.data.source import SOURCES
from fedstill.data.split import parse_split
from fedstill.methods import METHODS
from fedstill.models import MODELS, build
from fedstill.run.experiment import Experiment

PAPERS = {name: papers.load(name) for name in papers.names()}
SETTINGS = [(name, setting) for name, paper in PAPERS.items() for setting in paper["settings"]]
TABLES = [
    (name, id, table)
    for name, paper in PAPERS.items()
    for id, table in [(paper["method"]["id"], paper["method"]), *paper["baselines"].items()]
]
ALWAYS = (
    "data", "partition", "clients", "participation", "rounds", "epochs", "batch_size", "lr", "momentum", "weight_decay",
    "nesterov", "model",
)  # fmt: skip


def leaves(value):
    """Every value of a tree of tables and lists."""
    if isinstance(value, dict | list):
        assert value or isinstance(value, list)
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def parts_of(table):
    """A method's table, and what it says on some settings."""
    return [table, *table.get("on", {}).values()]


def test_there_are_five():
    assert papers.names() == ("cd2-pfed", "fedbsd", "pfedkd-wcl", "pfedsd", "spectral")


@pytest.mark.parametrize("name", papers.names())
def test_a_file_is_whole(name):
    paper = PAPERS[name]
    assert set(paper) == {"title", "venue", "note", "settings", "method", "baselines", "reported", "exhibits"}
    assert paper["method"]["id"] == name
    assert name not in paper["baselines"]
    for value in leaves({key: paper[key] for key in paper if key not in ("exhibits", "reported")}):
        assert not isinstance(value, str) or value.strip()
        assert not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_a_setting_makes_an_experiment(name, setting):
    table = PAPERS[name]["settings"][setting]
    assert set(ALWAYS) <= set(table)
    assert set(table["unstated"]) <= set(table)
    assert len(set(table["unstated"])) == len(table["unstated"])
    for method in ("", *PAPERS[name]["baselines"]):
        made = Experiment.from_values(papers.values(name, setting, method))
        assert made.method.id == (method or name)
        assert made.model in MODELS
        partition.parse(made.partition)
        parse_split(made.split)
        for source in (made.data, made.external) if made.external else (made.data,):
            for part in re.split(r"[@#]", source)[0].split("+"):
                assert part.partition(":")[0] in (*SOURCES, "synthetic")


@pytest.mark.parametrize(("name", "id", "table"), TABLES)
def test_a_method_takes_its_values(name, id, table):
    cls = METHODS[id]
    assert "note" in table
    assert set(table.get("unstated", ())) <= set().union(*parts_of(table))
    for part in parts_of(table):
        fields = {field: value for field, value in part.items() if field not in papers.BESIDE}
        built = settings.build(cls, fields)
        assert {field: getattr(built, field) for field in fields} == fields
        Experiment.from_values(part.get("experiment", {}))
    for field, tried in table.get("tried", {}).items():
        assert len(tried) > 1
        for value in tried:
            assert getattr(settings.build(cls, {field: value}), field) == value
    for pattern in table.get("on", {}):
        assert any(fnmatchcase(setting, pattern) for setting in PAPERS[name]["settings"]), pattern


def test_heads_are_modules_of_the_models():
    shapes = {"fmnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100)}
    for setting in PAPERS["pfedsd"]["settings"]:
        for method in ("fedper", "lg-fedavg"):
            made = Experiment.from_values(papers.values("pfedsd", setting, method))
            model = build(made.model, *shapes[made.data])
            assert all(model.get_submodule(head) is not None for head in made.head)


def test_common_and_patterns_are_put_in():
    one = papers.values("pfedsd", "cifar100-dirichlet-100", "fedprox")
    assert (one["clients"], one["participation"], one["weight_decay"]) == (100, 0.1, 1e-5)
    assert one["method"] == {"id": "fedprox", "mu": 0.001}
    assert papers.values("pfedsd", "cifar10-shards-20", "fedprox")["method"]["mu"] == 0.01
    assert papers.values("pfedsd", "fmnist-shards-20", "fedper")["head"] == ["fc2", "fc3"]
    assert papers.values("pfedsd", "cifar100-r60-resnet8", "lg-fedavg")["head"] == []
    assert papers.values("fedbsd", "cifar10-100-5")["method"]["backbone_epochs"] == 1
    assert papers.values("fedbsd", "cifar10-1000-2")["method"]["backbone_epochs"] == 5
    assert papers.values("fedbsd", "femnist-150-3", "fedavg")["fine_tune"] == 10
    assert papers.values("pfedkd-wcl", "synthetic-mlp", "pfedme")["method"]["lam"] == 30
    assert papers.values("cd2-pfed", "flickr-aes")["method"]["p"] == 0.8


def test_what_is_not_there_is_refused():
    for asked, says in (
        (("pfedds", "x"), "pfedsd"),
        (("pfedsd", "cifar10-dirichlet-2"), "cifar10-dirichlet-20"),
        (("pfedsd", "cifar10-dirichlet-20", "fedproxy"), "fedprox"),
    ):
        with pytest.raises(InputError, match=says):
            papers.values(*asked)
