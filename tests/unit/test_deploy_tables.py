"""Tables at real sites: what leaves a site before a run, and the same numbers as where all tables lie in one place."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedstill as fs
from fedstill.core import tree
from fedstill.core.errors import InputError, TrainingError
from fedstill.data import Federation, Preprocessing, load
from fedstill.data.columns import Columns
from fedstill.data.federation import Client
from fedstill.data.preprocess import fit
from fedstill.deploy import audit
from fedstill.deploy import hub as hubs
from fedstill.deploy.data import SiteData
from fedstill.deploy.disclosure import FEWEST, told
from fedstill.deploy.hub_server import parse_about
from fedstill.deploy.preparation import Agreed, agree, prepare
from fedstill.deploy.site import SiteClient
from fedstill.run.experiment import Experiment

from .test_deploy import NAMES, Party

RULES = {"impute": "mean", "encode": "onehot", "normalise": "federated"}
COLUMNS = {"label": "diagnosis", "ignore": "patient"}


def tables(folder: Path) -> Path:
    """Three sites' patients; site c has a category and a class that no other has, and drops of gaps everywhere."""
    rng = np.random.default_rng(5)
    folder.mkdir()
    for k, name in enumerate(NAMES):
        lines = ["patient;age;sex;pressure;diagnosis"]
        for i in range(60 - 12 * k):
            age, pressure = rng.normal(50 + 9 * k, 12), rng.normal(128, 15)
            sick = ("flu" if name == "c" and i % 9 == 0 else "ill") if age + pressure > 185 else "well"
            sex = "fmd"[rng.integers(3 if name == "c" else 2)]
            gap = "" if rng.random() < 0.15 else f"{pressure:.1f}".replace(".", ",")
            lines.append(f"{name}{i};{age:.2f};{sex};{gap};{sick}".replace(".", ","))
        (folder / f"{name}.csv").write_text("\n".join(lines))
    return folder


class Hospitals(Party):
    """Sites that read their tables."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None, folder)  # type: ignore[arg-type]
        self.tables = tables(folder / "tables")
        self.reading: dict[str, dict[str, Any]] = {}

    def own(self, name: str) -> SiteData:
        return SiteData.read(str(self.tables / f"{name}.csv"), **{**COLUMNS, **self.reading.get(name, {})})

    def sent(self) -> list[tuple[str, dict[str, Any]]]:
        """What sites have answered before the run."""
        return [(name, json.loads(body)) for name, header, body in self.wire if header["do"] == "prepared"]


@pytest.fixture
def party(tmp_path: Path) -> Any:
    made = Hospitals(tmp_path)
    yield made
    made.stop()


def together(party: Hospitals, **rules: str) -> Federation:
    """The same tables in one place, with the sites' own division into training and test samples."""
    data = load(party.tables, preprocessing=Preprocessing(**COLUMNS, **rules))
    assert data.owner is not None
    parts = []
    for k in range(3):
        rows = np.flatnonzero(data.owner == k)
        numbers = np.arange(len(rows), dtype=np.float32)[:, None]
        alone = dataclasses.replace(data, x=numbers, y=data.y[rows], owner=None, rules=Preprocessing(), columns=None)
        cut = Federation.from_dataset(alone, partition="iid", clients=1).clients[0]
        parts.append([rows[x.long().ravel().numpy()] for x in (cut.x_train, cut.x_test)])
    fitted = fit(data, [train for train, _ in parts], NAMES)
    clients = []
    for k, (train, test) in enumerate(parts):
        own = fitted.of(k)
        pairs = [(own.tensor(data.x[rows]), torch.from_numpy(data.y[rows])) for rows in (train, test)]
        clients.append(Client(*pairs[0], *pairs[1]))
    return Federation(
        tuple(clients), data.classes, "hospitals", "", partition_record={"format": 1, "hash": ""}, labels=data.labels
    )


HELD: dict[str, Any] = {"rounds": 3, "dtype": "float64", "lr": 0.05, "momentum": 0.9, "device": "cpu", "engine": "one"}


@pytest.mark.parametrize(
    "rules",
    [
        RULES,
        {"impute": "median", "encode": "onehot", "normalise": "site"},
        {"impute": "mean:site", "encode": "onehot", "normalise": "federated"},
        {"impute": "drop", "encode": "onehot", "normalise": "federated"},
        {"impute": "mean", "encode": "onehot"},
    ],
    ids=lambda rules: "-".join(rules.values()),
)
def test_sites_give_the_numbers_of_one_place(party: Hospitals, rules: dict[str, str]) -> None:
    one = fs.run(Experiment(method=fs.FedAvg(), **HELD), federation=together(party, **rules))
    for name in NAMES:
        party.start(name)
    sites = party.run(fs.FedAvg(), **rules, audit=True)
    merged = dict(tree.leaves(sites.server))
    for entry, leaf in tree.leaves(one.server):
        torch.testing.assert_close(merged[entry], leaf, rtol=0, atol=1e-10)
    for a, b in zip(one.history, sites.history, strict=True):
        for number in ("loss", "generic", "generic_clients", "steps"):
            assert a.get(number) == pytest.approx(b.get(number), abs=1e-10), number
    assert sites.outline is not None
    assert sites.outline.labels == ("flu", "ill", "well")
    assert sites.outline.preparation is not None
    assert sites.outline.preparation.columns.features == ("age", "sex=d", "sex=f", "sex=m", "pressure")  # type: ignore[union-attr]
    assert sites.outline.preparation.labels == ("diagnosis",)
    assert audit.of_hub(party.folder / "run") == []
    party.stop()
    for name in NAMES:
        (folder,) = (path for path in (party.folder / name).iterdir() if path.is_dir())
        assert audit.of_site(folder, party.own(name)) == []


def test_what_leaves_a_site_is_sums(party: Hospitals) -> None:
    """By column counts, sums, and sums of squares: the same two questions to all, and of a category only whether it occurs."""
    for name in NAMES:
        party.start(name)
    party.run(fs.FedAvg(), rounds=1, **RULES)
    sent = party.sent()
    assert sorted(name for name, _ in sent) == sorted(NAMES * 2)
    for name, answer in sent:
        assert answer.keys() == {"sizes", "sums"}
        sums = answer["sums"]
        assert {len(values) for values in sums.values()} == {5}
        assert answer["sizes"] == {"train": sums["count"][0], "test": answer["sizes"]["test"]}
        own = party.own(name).raw
        assert own is not None
        if "squares" in sums:
            assert sums["squares"][1:4] == sums["total"][1:4] == [0, 0, 0]
        else:
            assert sums["total"][1:4] == [float(name == "c"), 1, 1], "whether there is a sample, not how many"
            assert sums["count"][4] < sums["count"][0], "gaps are not counted"
    (about,) = (header["about"] for name, header, _ in party.wire if name == "c" and header["do"] == "hello")
    assert about["table"]["columns"] == {
        "names": ["age", "sex", "pressure"],
        "categories": [None, ["d", "f", "m"], None],
        "named": True,
    }
    assert about["labels"] == ["flu", "ill", "well"]
    assert parse_about(about)["table"]["gaps"] == about["table"]["gaps"]
    (served,) = (party.folder / "b").glob("*/personal.safetensors")
    with safe_open(served, "pt") as file:
        about = json.loads(file.metadata()["preprocessing"])
    assert about["label"] == ["diagnosis"], "so that the site can prepare new patients alike"
    kept = json.loads((party.folder / "run" / "deployment.json").read_text())["preparation"]
    assert kept["agreed"]["rules"]["normalise"] == "federated"


@pytest.mark.parametrize(
    "rules", [{"impute": "median", "normalise": "site"}, {"impute": "drop"}], ids=lambda rules: "-".join(rules.values())
)
def test_no_sum_of_numbers_leaves_a_site_without_a_rule_that_needs_it(party: Hospitals, rules: dict[str, str]) -> None:
    """One question alone: of numbers nothing, of a category whether it occurs; a site refuses a second one."""
    for name in NAMES:
        party.start(name)
    party.run(fs.FedAvg(), rounds=1, encode="onehot", **rules)
    sent = party.sent()
    assert sorted(name for name, _ in sent) == sorted(NAMES)
    for name, answer in sent:
        assert answer["sums"].keys() == {"count", "total"}
        assert answer["sums"]["total"] == [0, float(name == "c"), 1, 1, 0]
        assert answer["sums"]["count"] == [0, *[answer["sizes"]["train"]] * 3, 0]
    kept = json.loads((party.folder / "run" / "deployment.json").read_text())["preparation"]
    question = {"agreed": kept["agreed"], "mean": [0.0] * 5}
    with pytest.raises(InputError, match=r"mean = of the hub: should be left out: impute .* need no sums of numbers"):
        SiteClient(party.folder / "d", party.own("a")).prepare(json.dumps(question).encode())


def test_squares_leave_a_site_only_for_a_deviation(party: Hospitals) -> None:
    for name in NAMES:
        party.start(name)
    party.run(fs.FedAvg(), rounds=1, impute="mean", encode="onehot")
    squares = [answer["sums"]["squares"] for _, answer in party.sent() if "squares" in answer["sums"]]
    assert squares == [[0.0] * 5] * 3


@pytest.mark.parametrize("privacy", ["local", "central"])
def test_nothing_is_asked_that_epsilon_does_not_count(privacy: str) -> None:
    """Refused before a site is asked; a site that counts ε answers with numbers of samples alone."""
    private: dict[str, Any] = {"privacy": privacy, "noise_multiplier": 1.0, "clip_norm": 1.0}
    experiment = Experiment(method=fs.FedAvg(), encode="onehot", impute="drop", **private)
    with pytest.raises(
        InputError, match=f"encode = 'onehot': should be 'none' with privacy '{privacy}': ε does not count"
    ):
        hubs.check(experiment)
    hubs.check(dataclasses.replace(experiment, encode="none"))


def test_a_site_that_counts_gives_numbers_of_samples(tmp_path: Path) -> None:
    rows = [f"{i if i % 3 else ''},{i % 2}" for i in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["age,ill", *rows]))
    site = SiteData.read(str(tmp_path / "a.csv"))
    agreed = agree(Preprocessing(impute="drop"), ["a"], [site.about()])
    assert agreed is not None
    asked = json.dumps({"agreed": agreed.to_dict()}).encode()
    answer = json.loads(SiteClient(tmp_path / "site", site, max_epsilon=3.0).prepare(asked))
    assert answer == {"sizes": {"train": 16, "test": 4}}


def test_texts_of_few_patients_stay_at_a_site(tmp_path: Path) -> None:
    """A forgotten --ignore is refused before the hub hears of it; what its owner names is sent, and said."""
    rows = [f"{'ann' if i < 26 else 'zoe'} {i},{30 + i},{'fm'[i % 2]},{'ill' if i % 3 else 'well'}" for i in range(40)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["full name,age,sex,diagnosis", *rows]))
    with pytest.raises(InputError) as caught:
        SiteData.read(str(path))
    said = (
        "column 'full name' = 40 of its 40 texts that fewer than 5 rows have: should be left out (--ignore 'full name')"
    )
    assert str(caught.value).startswith(said)
    assert "ann" not in str(caught.value)
    own = SiteData.read(str(path), ignore="full name")
    assert own.about()["table"]["columns"]["categories"] == [None, ["f", "m"]]
    assert own.raw is not None
    assert told(own.raw.data) == [
        "the hub is told the texts of sex: f, m",
        "the hub is told the names of ill, well as what is learned",
    ]
    named = SiteData.read(str(path), encode="onehot:full name")
    assert len(named.about()["table"]["columns"]["categories"][0]) == 40
    assert named.raw is not None
    assert "ann 0, ann 1, ann 10, ann 11, ann 12, ann 13 and 34 more" in told(named.raw.data)[1]
    for few in (4, 5):
        path.write_text("\n".join(["ward,age,ill", *(f"{'b' if i < few else 'a'},{i},{i % 2}" for i in range(40))]))
        if few < 5:
            with pytest.raises(InputError, match="column 'ward' = 1 text that fewer than 5 rows have"):
                SiteData.read(str(path))
        else:
            SiteData.read(str(path))


def test_totals_are_kept_and_not_asked_for_again(party: Hospitals) -> None:
    for name in NAMES:
        party.start(name)
    whole = party.run(fs.SCAFFOLD(), out="whole", rounds=4, **RULES)
    party.run(fs.SCAFFOLD(), rounds=2, **RULES)
    asked = len(party.sent())
    party.stop()
    for name in NAMES:
        party.start(name)
    experiment = Experiment(method=fs.SCAFFOLD(), **{**HELD, "rounds": 2, **RULES})
    assert not party.hub_server.wait_for(NAMES, 20)
    again = hubs.run(party.hub_server, experiment, NAMES, party.folder / "run", rounds=4)
    assert len(party.sent()) == asked
    for (entry, a), (_, b) in zip(tree.leaves(whole.server), tree.leaves(again.server), strict=True):
        assert torch.equal(a, b), entry


def test_what_does_not_fit_is_one_line(party: Hospitals, tmp_path: Path) -> None:
    for name in NAMES:
        party.start(name)
    for rules, says in (
        ({}, "encode = 'none': should be 'onehot': column 'sex' has texts at site 'a'"),
        ({"encode": "onehot"}, "impute = 'none': should be mean, median or drop: site 'a' has \\d+ gaps in 'pressure'"),
        ({"label": "diagnosis"}, "label = 'diagnosis': should be left out in a deployment: a site's owner says it"),
        ({"encode": "onehot:sex"}, "a site's owner names columns"),
    ):
        with pytest.raises(InputError, match=says):
            party.run(fs.FedAvg(), **rules)
    party.stop("c")
    lines = (party.tables / "c.csv").read_text().splitlines()
    few = [
        lines[0],
        *(";".join(["x", "40", "f", "128" if i < FEWEST - 2 else "", "ill" if i % 2 else "well"]) for i in range(30)),
    ]
    (party.tables / "c.csv").write_text("\n".join(few))
    party.start("c")
    party.hub_server.sites.pop("c")
    says = f"site c: sums = . values of pressure: should be none or at least {FEWEST} at a site: fewer would tell of single"
    with pytest.raises(TrainingError, match=says):
        party.run(fs.FedAvg(), **RULES)
    party.stop("c")
    (party.tables / "c.csv").write_text("patient;age;pressure;sex;diagnosis\n" + 5 * "x;1;2;f;ill\ny;2;3;m;well\n")
    party.start("c")
    party.hub_server.sites.pop("c")
    with pytest.raises(
        InputError, match="columns of site 'c' = age, pressure, sex: should be age, sex, pressure as at site 'a'"
    ):
        party.run(fs.FedAvg(), **RULES)


def test_arrays_are_scaled_too(tmp_path: Path) -> None:
    """npz files: features by the same sums; a run without rules asks for nothing."""
    rng = np.random.default_rng(2)
    sites = []
    for k, name in enumerate(NAMES):
        x, y = rng.normal(40 + 5 * k, 9, (50 - 9 * k, 3)).astype(np.float32), rng.integers(0, 2, 50 - 9 * k)
        np.savez(tmp_path / f"{name}.npz", train_x=x[:-12], train_y=y[:-12], test_x=x[-12:], test_y=y[-12:])
        sites.append((x, y))

    class Arrays(Party):
        def own(self, name: str) -> SiteData:
            return SiteData.read(str(tmp_path / f"{name}.npz"))

    party = Arrays(None, tmp_path / "party")  # type: ignore[arg-type]
    try:
        for name in NAMES:
            party.start(name)
        party.run(fs.FedAvg(), out="plain", rounds=1)
        assert not [header for _, header, _ in party.wire if header["do"] == "prepared"]
        run = party.run(fs.FedAvg(), normalise="federated")
    finally:
        party.stop()
    pool = np.concatenate([x[:-12] for x, _ in sites]).astype(np.float64)
    scaled = [(((x - pool.mean(0)) / pool.std(0)).astype(np.float32), y) for x, y in sites]
    fed = Federation.from_arrays([(x[:-12], y[:-12], x[-12:], y[-12:]) for x, y in scaled], classes=2)
    one = fs.run(Experiment(method=fs.FedAvg(), **HELD), federation=fed)
    merged = dict(tree.leaves(run.server))
    for entry, leaf in tree.leaves(one.server):
        torch.testing.assert_close(
            merged[entry], leaf, rtol=0, atol=1e-7
        )  # float32 samples of two ways to compute them


def test_normalise_none_holds_for_images_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 256, (40, 1, 4, 4)).astype(np.uint8), np.arange(40) % 2
    np.savez(tmp_path / "a.npz", train_x=x[:30], train_y=y[:30], test_x=x[30:], test_y=y[30:])
    site = SiteData.read(str(tmp_path / "a.npz"))
    assert agree(Preprocessing(), ["a"], [site.about()]) is None
    agreed = agree(Preprocessing(normalise="none"), ["a"], [site.about()])
    assert agreed is not None
    client = SiteClient(tmp_path / "site", site)
    prepared = prepare(agreed, ["a"], lambda body: {"a": client.prepare(body)})
    assert prepared.totals is None
    made = site.under(prepared.for_sites()).client
    assert torch.equal(made.x_train, torch.from_numpy(x[:30]).float() / 255)
    assert torch.equal(made.x_test, torch.from_numpy(x[30:]).float() / 255)


def test_a_column_without_values_at_one_site_has_the_categories_of_others(tmp_path: Path) -> None:
    abouts = []
    for name, stage in (("a", ""), ("b", "1")):
        (tmp_path / f"{name}.csv").write_text("age,stage,y\n" + f"1,{stage},0\n2,{stage},1\n" * 10)
        abouts.append(SiteData.read(str(tmp_path / f"{name}.csv"), encode="onehot:stage").about())
    agreed = agree(Preprocessing(encode="onehot", impute="mean"), ["a", "b"], abouts)
    assert agreed is not None
    assert agreed.columns is not None
    assert agreed.columns.features == ("age", "stage=1")
    own = SiteData.read(str(tmp_path / "a.csv"), encode="onehot:stage").raw
    assert own is not None
    assert own.under(agreed).values.data.columns == agreed.columns
    assert np.isnan(own.under(agreed).data.x[:, 1]).all()


def test_samples_without_a_label_are_said_and_refused_without_a_rule(tmp_path: Path) -> None:
    rows = [f"{i},{'' if i < 3 else i % 2}" for i in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["age,ill", *rows]))
    own = SiteData.read(str(tmp_path / "a.csv"))
    assert own.raw is not None
    (line,) = told(own.raw.data)
    assert line.startswith("left out: 3 of 30 samples, without a label")
    about = parse_about({**own.about(), "machine": {"clock": 0, "memory": 0, "disk": 0}})
    assert about["table"]["unlabelled"] == 3
    with pytest.raises(InputError, match=r"impute = 'none': should be .*: site 'a' has 3 without a label"):
        agree(Preprocessing(), ["a"], [about])
    for impute in ("drop", "mean"):
        assert agree(Preprocessing(impute=impute), ["a"], [about]) is not None


def test_sums_that_are_none_are_one_line(party: Hospitals) -> None:
    """Of a site that answers with something else, and of a hub that asks for something else."""
    sites = {name: party.own(name) for name in NAMES}
    abouts = [parse_about({**own.about(), "machine": {"clock": 0, "memory": 0, "disk": 0}}) for own in sites.values()]
    agreed = agree(Preprocessing(**RULES), NAMES, abouts)
    assert agreed is not None
    clients = {name: SiteClient(party.folder / name, own) for name, own in sites.items()}
    right = {
        name: client.prepare(json.dumps({"agreed": agreed.to_dict()}).encode()) for name, client in clients.items()
    }
    good = json.loads(right["b"])

    def changed(**sums: Any) -> bytes:
        return json.dumps({**good, "sums": {**good["sums"], **sums}}).encode()

    for wrong in (
        b"",
        b"[]",
        b'{"sizes": {"train": 0}}',
        b'{"sizes": {}, "sums": 3}',
        changed(count=[1, 2]),
        changed(total="x"),
        changed(total=[1.7e308] * 5),
        json.dumps({**good, "sums": []}).encode(),
        json.dumps({**good, "sums": {**good["sums"], "count": 5}}).encode(),
        json.dumps({"sizes": good["sizes"]}).encode(),
    ):
        with pytest.raises(TrainingError, match="site b: its") as caught:
            prepare(agreed, NAMES, lambda body, wrong=wrong: {**right, "b": wrong})  # type: ignore[misc]
        with pytest.raises(TrainingError, match="site b: its"):  # also where it is the first
            prepare(agreed, ["b", "a", "c"], lambda body, wrong=wrong: {**right, "b": wrong})  # type: ignore[misc]
        assert str(caught.value).isprintable()
    for question in (b"", b"[1]", b"{}", json.dumps({"agreed": {**agreed.to_dict(), "rules": {}}}).encode()):
        with pytest.raises(InputError, match="question = of the hub: should be"):
            clients["a"].prepare(question)
    with pytest.raises(InputError, match="mean = 2 numbers: should be 5, one for each feature"):
        clients["a"].prepare(json.dumps({"agreed": agreed.to_dict(), "mean": [0.0, 1.0]}).encode())
    with pytest.raises(InputError, match="mean = of the hub: should be of numbers that fit float32"):
        clients["a"].prepare(json.dumps({"agreed": agreed.to_dict(), "mean": [1e308] * 5}).encode())
    images = Agreed(Preprocessing(normalise="federated"), None, ())
    for sums in ([], {"count": 5}, {}, 3):
        with pytest.raises(TrainingError, match="site b: its sums should be"):
            prepare(images, ["b"], lambda body, sums=sums: {"b": json.dumps({**good, "sums": sums}).encode()})  # type: ignore[misc]
    short = {"count": [3.0], "mean": [0.0], "std": [1.0]}
    for totals in ({}, {"totals": short}, {"totals": {**short, "std": [0.0]}}, {"totals": 3}):
        with pytest.raises(InputError, match="= of the hub: should be"):
            sites["a"].under({"agreed": agreed.to_dict(), **totals})
    other = Agreed(agreed.rules, Columns(("age",), (None,)), agreed.labels)
    with pytest.raises(InputError, match="with the columns age"):
        clients["a"].prepare(json.dumps({"agreed": other.to_dict()}).encode())
    counting = SiteClient(party.folder / "d", sites["a"], max_epsilon=3.0)
    with pytest.raises(
        InputError, match=r"max_epsilon = 3\.0: should be 0: sums of training samples are nothing that ε counts"
    ):
        counting.prepare(json.dumps({"agreed": agreed.to_dict()}).encode())
    with pytest.raises(
        InputError, match="a table with gaps or texts: should be numbers without gaps, or a run that says"
    ):
        sites["a"].under(None)
    answer, _ = party.hub_server.answer(
        "a", {"do": "hello", "version": fs.__version__, "about": {**abouts[0], "table": 3}}, b""
    )
    assert answer == {"refused": "what it tells of itself cannot be read"}
