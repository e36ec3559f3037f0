"""Rules fitted on training samples: against numpy on the pooled samples, and never on a test sample."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill as fs
from fedstill.core.errors import InputError
from fedstill.core.reading import Unreadable
from fedstill.data import Dataset, Federation, Preprocessing, load
from fedstill.data.columns import Columns
from fedstill.data.outline import Outline
from fedstill.data.own import read
from fedstill.data.preprocess import Preparation, fit
from fedstill.data.sums import Sums, add, deviations, mean_of, moments_of, sums
from fedstill.run.prepare import federation_of

RNG = np.random.default_rng(0)


# ---- the sums --------------------------------------------------------------------------------------------------------
def pooled(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation by the exchange of sums, each site's samples in two chunks."""
    halves = [[part[: len(part) // 2], part[len(part) // 2 :]] for part in parts]
    mean = mean_of(add([sums(chunks) for chunks in halves]))
    return moments_of(mean, add([deviations(chunks, mean) for chunks in halves]))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1.6e9, -3e11])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_sums_of_sites_give_the_pooled_mean_and_deviation(offset: float, scale: float) -> None:
    """To 1e-12 relative, also where E[x²] − E[x]² has no right digit left, with gaps and sites of very different sizes."""
    parts = [offset + scale * (RNG.normal(size=(n, 3)) + 3 * k) for k, n in enumerate((1, 7, 500, 60))]
    for part in parts:
        part[RNG.random(part.shape) < 0.1] = np.nan
    together = np.concatenate(parts)
    mean, std = pooled(parts)
    right = np.array([float(sum(map(Fraction, c[~np.isnan(c)])) / int((~np.isnan(c)).sum())) for c in together.T])
    np.testing.assert_allclose(mean, right, rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(mean, np.nanmean(together, 0), rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(std, np.nanstd(together - right, 0), rtol=1e-12)
    if offset == 1.6e9 and scale == 1.0:
        naive = np.nanmean(together**2, 0) - np.nanmean(together, 0) ** 2
        assert np.abs(naive / std**2 - 1).max() > 1e-6, "the easy formula would be told from ours"


def test_a_constant_is_not_divided_by_its_rounding() -> None:
    parts = [np.full((n, 3), (0.1, 1e9 + 0.1, 0.0)) for n in (3, 10, 77, 50_000)]
    for _ in range(100):
        value, sizes = RNG.normal() * 10.0 ** RNG.integers(-6, 12), RNG.integers(1, 2000, RNG.integers(1, 6))
        assert pooled([np.full((int(n), 1), value) for n in sizes])[1].tolist() == [1]
    mean, std = pooled(parts)
    np.testing.assert_allclose(mean, [0.1, 1e9 + 0.1, 0.0], rtol=1e-15)
    assert std.tolist() == [1, 1, 1]
    assert pooled([*parts, np.full((1, 3), 2e9)])[1].min() > 1e6, "what varies is divided by its deviation"


def test_sums_from_a_site_are_checked() -> None:
    part = deviations([RNG.normal(size=(5, 2))], np.zeros(2))
    again = Sums.from_dict(json.loads(json.dumps(part.to_dict())), 2, squares=True)
    for name in ("count", "total", "squares"):
        assert np.array_equal(getattr(again, name), getattr(part, name))
    good = part.to_dict()
    largest = float(np.finfo(np.float32).max)
    extremes = deviations([np.array([[largest, 0.0], [-largest, 0.0]])], np.array([largest, 0.0]))
    Sums.from_dict(json.loads(json.dumps(extremes.to_dict())), 2, squares=True)
    for wrong in (
        {"count": [-1.0, 5.0]},
        {"count": [0.5, 5.0]},
        {"total": [1.0]},
        {"squares": [-1.0, 1.0]},
        {"total": [1.7e308, 0.0]},
        {"total": [-3.5e39, 0.0]},
        {"squares": [1.7e308, 0.0]},
        {"count": [1e300, 5.0]},
        {"total": "x"},
    ):
        with pytest.raises(Unreadable):
            Sums.from_dict({**good, **wrong}, 2, squares=True)


# ---- tables ----------------------------------------------------------------------------------------------------------
SITES = {"berlin": 90, "lyon": 40, "porto": 25}


def hospitals(folder: Path, seed: int = 0, test_age: float | None = None) -> Path:
    """Tables with gaps; `test_age` is the age in the last fifth of the rows."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    for k, (name, n) in enumerate(SITES.items()):
        lines = ["age,bmi,sex,fixed,label"]
        for i in range(n):
            age = f"{rng.normal(50 + 5 * k, 12):.3f}" if rng.random() > 0.1 else ""
            bmi, sex = f"{rng.normal(26, 4):.3f}" if rng.random() > 0.2 else "NA", "fmd"[rng.integers(3)]
            lines.append(f"{age if test_age is None or i < 0.8 * n else test_age},{bmi},{sex},7.1,{i % 2}")
        (folder / f"{name}.csv").write_text("\n".join(lines))
    return folder


def cut(folder: Path, **rules: str) -> tuple[Dataset, list[np.ndarray]]:
    """A data set whose clients train on the first four fifths of their rows."""
    data = load(folder, preprocessing=Preprocessing(encode="onehot", **rules))
    assert data.owner is not None
    return data, [rows[: math.ceil(0.8 * len(rows))] for rows in (np.flatnonzero(data.owner == k) for k in range(3))]


def columns_of(data: Dataset, train: list[np.ndarray]) -> list[np.ndarray]:
    """Age and BMI of each client's training samples, as they are in the files."""
    return [data.x[rows][:, :2] for rows in train]


@pytest.mark.parametrize("scope", ["federated", "site"])
def test_numbers_are_scaled_by_training_samples_alone(tmp_path: Path, scope: str) -> None:
    """By all sites' or each site's own; in test samples anything may stand without changing a statistic."""
    data, train = cut(hospitals(tmp_path / "a"), impute="mean:federated", normalise=scope)
    raw, fitted = columns_of(data, train), fit(data, train)
    pool = np.concatenate(raw)
    for k, rows in enumerate(train):
        of = pool if scope == "federated" else raw[k]
        filled = np.where(np.isnan(raw[k]), np.nanmean(pool, 0), raw[k])
        right = (filled - np.nanmean(of, 0)) / np.nanstd(of, 0)
        made = fitted.of(k).tensor(data.x[rows]).double().numpy()
        np.testing.assert_allclose(made[:, :2], right, rtol=1e-6, atol=1e-6)
        assert set(np.unique(made[:, 2:5])) <= {0.0, 1.0}, "categories stay 0 and 1"
        assert made[:, 2:5].sum(1).tolist() == [1.0] * len(rows)
        assert np.abs(made[:, 5]).max() < 1e-12, "a constant becomes 0"
        there = ~np.isnan(raw[k]).any(1)
        if scope == "site":
            np.testing.assert_allclose(made[:, 0][~np.isnan(raw[k][:, 0])].std(), 1, rtol=1e-6)
        assert there.any()
    other, same = cut(hospitals(tmp_path / "b", test_age=1e6), impute="mean:federated", normalise=scope)
    assert not np.array_equal(other.x, data.x, equal_nan=True)
    assert fit(other, same).preparation == fitted.preparation


@pytest.mark.parametrize("impute", ["mean", "mean:site", "median"])
def test_gaps_are_filled_by_the_rule(tmp_path: Path, impute: str) -> None:
    data, train = cut(hospitals(tmp_path / "a"), impute=impute)
    raw, fitted = columns_of(data, train), fit(data, train)
    for k, own in enumerate(raw):
        of, take = {
            "mean": (np.concatenate(raw), np.nanmean),
            "mean:site": (own, np.nanmean),
            "median": (own, np.nanmedian),
        }[impute]
        everything = np.flatnonzero(data.owner == k)
        x = data.x[everything][:, :2]
        right = np.where(np.isnan(x), take(of, axis=0), x)
        assert np.isnan(x).any()
        np.testing.assert_allclose(fitted.of(k).tensor(data.x[everything]).numpy()[:, :2], right, rtol=1e-6)
    (note,) = [note for note in fitted.notes if note.startswith("gaps")]
    count = np.isnan(data.x[:, :2]).sum(0)
    assert note.endswith(f": age {count[0]}, bmi {count[1]}")
    assert ("all sites'" in note) == (impute == "mean")


def test_samples_with_gaps_are_dropped_before_dealing_and_counted(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "a")
    whole = {
        n: sum(
            "," + line.count(",") * "" in line and not {"", "NA"} & set(line.split(","))
            for line in (folder / f"{n}.csv").read_text().splitlines()[1:]
        )
        for n in SITES
    }
    data = load(folder, preprocessing=Preprocessing(encode="onehot", impute="drop"))
    fed = Federation.from_dataset(data, partition="owner", clients=None)
    assert [a + b for a, b in zip(fed.sizes("train"), fed.sizes("test"), strict=True)] == list(whole.values())
    left = {name: SITES[name] - count for name, count in whole.items()}
    said = ", ".join(f"{name} {count}" for name, count in left.items())
    assert fed.notes[0] == f"left out: {sum(left.values())} of 155 samples, with gaps (--impute drop): {said}"
    assert fed.names == tuple(SITES)


def test_a_column_that_a_site_has_no_value_of(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,bp,y\n30,,0\n40,,1\n50,,0\n")
    (tmp_path / "b.csv").write_text("age,bp,y\n30,110,0\n40,130,1\n50,,0\n")
    for rule in ("mean:site", "median"):
        data = load(tmp_path, preprocessing=Preprocessing(impute=rule))
        with pytest.raises(
            InputError, match=f"impute = {rule} of bp: should be 'mean:federated', or .* site a has none"
        ):
            fit(data, [np.arange(3), np.arange(3, 6)], ("a", "b"))
    data = load(tmp_path, preprocessing=Preprocessing(impute="mean", normalise="site"))
    made = fit(data, [np.arange(3), np.arange(3, 6)]).of(0).tensor(data.x[:3])
    assert made[:, 1].tolist() == [0, 0, 0], "filled with what it has as its mean"
    assert made[:, 0].tolist() == pytest.approx([-(1.5**0.5), 0, 1.5**0.5])
    (tmp_path / "b.csv").write_text("age,bp,y\n30,,0\n40,,1\n50,120,0\n")
    data = load(tmp_path, preprocessing=Preprocessing(impute="mean"))
    with pytest.raises(
        InputError, match="impute = mean of bp: should be another rule: no site has a value in its training"
    ):
        fit(data, [np.arange(3), np.arange(3, 5)])


def test_a_category_of_test_samples_alone_is_zeros(tmp_path: Path) -> None:
    """The form of a sample is that of all rows, so it does not depend on the seed; what nobody has trained on says nothing."""
    (tmp_path / "a.csv").write_text("sex,y\nf,0\nm,1\nd,0\n")
    data = load(tmp_path, preprocessing=Preprocessing(encode="onehot"))
    made = fit(data, [np.array([0, 1])]).of(0).tensor(data.x)
    assert made.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert fit(data, [np.array([0, 1, 2])]).of(0).tensor(data.x).tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_without_rules_a_table_is_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,y\n1.1,2e9,0\n3,4,1\n5,6,1\n")
    fed = Federation.from_dataset(load(tmp_path), partition="owner", clients=None)
    rows = {tuple(row) for c in fed.clients for x in (c.x_train, c.x_test) for row in x.tolist()}
    assert rows == {(float(np.float32(1.1)), 2e9), (3.0, 4.0), (5.0, 6.0)}
    assert fed.preparation is not None
    assert fed.preparation.columns == Columns(("a", "b"), (None, None))
    assert fed.notes == ()


# ---- other samples ---------------------------------------------------------------------------------------------------
def test_features_of_arrays_are_scaled_too(tmp_path: Path) -> None:
    x = RNG.normal(40, 9, (60, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=RNG.integers(0, 2, 60))
    data = load(tmp_path / "a.npz", preprocessing=Preprocessing(normalise="federated"))
    fed = Federation.from_dataset(data, partition="iid", clients=4)
    train = torch.cat([c.x_train for c in fed.clients]).double()
    assert train.mean(0).abs().max() < 1e-6
    assert (train.std(0, correction=0) - 1).abs().max() < 1e-6
    own = Federation.from_dataset(
        load(tmp_path / "a.npz", preprocessing=Preprocessing(normalise="site")), partition="iid", clients=4
    )
    for client in own.clients:
        assert client.x_train.double().mean(0).abs().max() < 1e-6


@pytest.mark.parametrize("normalise", ["auto", "none", "federated", "site"])
def test_images(tmp_path: Path, normalise: str) -> None:
    """By default as their source says; else by the clients' training samples, channel by channel, or not at all."""
    x = RNG.integers(0, 256, (40, 3, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 2)
    data = load(tmp_path / "a.npz", preprocessing=Preprocessing(normalise=normalise))
    fed = Federation.from_dataset(data, partition="iid", clients=2, seed=1)
    rows = [np.array(own) for own in fed.partition_record["indices"]]
    scaled = x / 255
    plain = Federation.from_dataset(
        load(tmp_path / "a.npz", preprocessing=Preprocessing(normalise="none")), partition="iid", clients=2, seed=1
    )
    for k, client in enumerate(fed.clients):
        before = plain.clients[k].x_train.double().numpy()  # the bytes that were drawn for training
        assert {tuple(i) for i in np.rint(before * 255).reshape(len(before), -1)} <= {
            tuple(i) for i in x[rows[k]].reshape(20, -1).astype(float)
        }
        of = {
            "auto": scaled,
            "federated": np.concatenate([c.x_train.double().numpy() for c in plain.clients]),
            "site": before,
        }.get(normalise)
        right = before
        if of is not None:
            mean, std = of.mean((0, 2, 3), keepdims=True), of.std((0, 2, 3), keepdims=True)
            right = (before - mean) / std
        np.testing.assert_allclose(client.x_train.double().numpy(), right, atol=2e-6)
    assert bool(fed.mean) == (normalise in ("auto", "federated"))
    assert len(fed.notes) == (normalise in ("federated", "site"))


def test_statistics_of_a_site_do_not_fit_samples_of_nobody(tmp_path: Path) -> None:
    x = RNG.normal(size=(40, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", train_x=x, train_y=np.arange(40) % 2, test_x=x[:9], test_y=np.arange(9) % 2)
    data = load(tmp_path / "a.npz", preprocessing=Preprocessing(normalise="site"))
    with pytest.raises(
        InputError, match="normalise = 'site': should be 'none' or 'federated' where there are samples of no"
    ):
        Federation.from_dataset(data, partition="iid", clients=2, pool="train")


def test_what_privacy_does_not_count_is_refused(tmp_path: Path) -> None:
    """Before data are read, and for a federation that was made in Python."""
    private: dict[str, Any] = {"privacy": "local", "noise_multiplier": 1.0, "clip_norm": 1.0}
    with pytest.raises(InputError, match="normalise = 'site': should be 'none' with privacy 'local': ε does not count"):
        federation_of(fs.Experiment(normalise="site", data=str(tmp_path / "nowhere"), **private))
    with pytest.raises(InputError, match="impute = 'mean': should be 'drop' with privacy 'local'"):
        federation_of(fs.Experiment(impute="mean", data=str(tmp_path / "nowhere"), **private))
    fed = federation(tmp_path / "a", impute="mean", normalise="federated")
    with pytest.raises(InputError, match="normalise = 'federated': should be 'none' with privacy 'local'"):
        fs.simulate(method=fs.FedAvg(), model=torch.nn.Linear(6, 2), data=fed, rounds=1, **private)


# ---- what is kept ----------------------------------------------------------------------------------------------------
def federation(folder: Path, **rules: str) -> Federation:
    data = load(hospitals(folder), preprocessing=Preprocessing(encode="onehot", **rules))
    return Federation.from_dataset(data, partition="owner", clients=None)


@pytest.mark.parametrize(
    "rules", [{"impute": "mean", "normalise": "federated"}, {"impute": "median", "normalise": "site"}]
)
def test_a_new_table_is_prepared_as_the_clients_was(tmp_path: Path, rules: dict[str, str]) -> None:
    """From the record that is kept, through JSON: columns found by name, gaps filled, categories that are unknown left out."""
    fed = federation(tmp_path / "a", **rules)
    outline = Outline.from_dict(json.loads(json.dumps(Outline.of(fed).to_dict())))
    assert outline == Outline.of(fed)
    made = fed.preparation
    assert made is not None
    assert made.columns is not None
    for k, name in enumerate(fed.names):
        own = read(tmp_path / "a" / f"{name}.csv", outline, k)
        known = torch.cat([fed.clients[k].x_train, fed.clients[k].x_test])
        assert {tuple(row) for row in own.x.tolist()} == {tuple(row) for row in known.tolist()}, "to the bit"
        assert own.y is not None
        assert own.y.tolist() == [i % 2 for i in range(SITES[name])]
    (tmp_path / "new.csv").write_text("fixed;sex;note;bmi;age\n7,1;x;hm;;50,5\n7,1;f;;26,0;\n")
    new = read(tmp_path / "new.csv", outline, 1)
    assert new.y is None
    transform = made.of(1)
    assert new.x[0, 2:5].tolist() == [0, 0, 0]
    assert new.x[1, 2:5].tolist() == [0, 1, 0]
    bmi = (transform.fill[1] - transform.mean[1]) / transform.std[1]
    assert new.x[0, 1].item() == pytest.approx(bmi, abs=1e-6)
    assert new.x[0, 0].item() == pytest.approx((50.5 - transform.mean[0]) / transform.std[0], rel=1e-6)
    rows = "".join(f"7.1,f,note {i},26,{i},{i % 2}\n" for i in range(1500))
    (tmp_path / "new.csv").write_text("fixed,sex,note,bmi,age,label\n" + rows)  # the notes are not even read
    many = read(tmp_path / "new.csv", outline, 1)
    assert many.y is not None
    assert many.y.tolist() == [i % 2 for i in range(1500)]
    (tmp_path / "new.csv").write_text("50,26,f,7.1,1\n")
    with pytest.raises(
        InputError, match=r"with a header, or 4 columns as the run's features \(it has 5 and no header\)"
    ):
        read(tmp_path / "new.csv", outline, 1)  # nobody knows which is the label
    (tmp_path / "new.csv").write_text("sex,age\nf,50\n")
    with pytest.raises(InputError, match=r"with the column .*: 'bmi' is not there"):
        read(tmp_path / "new.csv", outline, 1)
    if made.own:
        with pytest.raises(
            InputError, match="client = none: should be a client: the run prepared each site's samples by"
        ):
            read(tmp_path / "a" / "lyon.csv", outline)


def outline_of(path: Path, **rules: str) -> Outline:
    """What a run of two clients keeps of a source."""
    data = load(path, preprocessing=Preprocessing(**rules))
    return Outline.of(Federation.from_dataset(data, partition="iid", clients=2))


def stages(path: Path, header: str) -> Path:
    rows = [f"{30 + i},{1 + i % 3},{'fm'[i % 2]},{i % 2}" for i in range(30)]
    path.write_text("\n".join([*([header] if header else []), *rows]))
    return path


def test_a_number_is_the_category_of_that_name(tmp_path: Path) -> None:
    """Not the category of that index, where a file has no header; arrays do not say which it is."""
    outline = outline_of(stages(tmp_path / "a.csv", "age,stage,sex,ill"), encode="onehot:stage")
    new = tmp_path / "new.csv"
    for header, text in (("", "1,2.0,3"), ("age,stage,sex", "1,2.0,3")):
        for k, stage in enumerate(text.split(",")):
            new.write_text(f"{header}\n40,{stage},f\n41,{stage},m\n".lstrip())
            made = read(new, outline)
            assert made.x.tolist() == [[40, *np.eye(3)[k].tolist(), 1, 0], [41, *np.eye(3)[k].tolist(), 0, 1]]
            assert made.notes == ()
    np.savez(tmp_path / "new.npz", x=np.array([[40, 1, 0]], np.float32))
    with pytest.raises(
        InputError, match="should be a CSV file: the run has categories in stage, sex, which arrays do not"
    ):
        read(tmp_path / "new.npz", outline)
    new.write_text("40,1,f,0\n")
    with pytest.raises(InputError, match="with a header, or 3 columns as the run's features"):
        read(new, outline)


def test_unknown_categories_are_said(tmp_path: Path) -> None:
    outline = outline_of(stages(tmp_path / "a.csv", "age,stage,sex,ill"), encode="onehot:stage")
    (tmp_path / "new.csv").write_text("age,stage,sex\n40,4,d\n41,2,d\n42,,f\n")
    own = read(tmp_path / "new.csv", outline)
    assert own.notes == (
        "categories that the run does not know are zeros in all features of their column: stage 1, sex 2",
    )
    assert own.x.tolist() == [[40, 0, 0, 0, 0, 0], [41, 0, 1, 0, 0, 0], [42, 0, 0, 0, 1, 0]]
    (tmp_path / "b.csv").write_text("age,stage,sex,ill\n40,4,d,1\n41,2,d,0\n")
    e = fs.Experiment(
        data=str(tmp_path / "a.csv"),
        external=str(tmp_path / "b.csv"),
        encode="onehot:stage",
        clients=2,
        partition="iid",
    )
    notes = federation_of(e).notes
    assert notes[-1].startswith("external: categories that the run does not know")
    assert notes[-1].endswith(": stage 1, sex 2")


def test_only_the_label_of_the_run_is_the_truth(tmp_path: Path) -> None:
    """A coordinate y is none, where the run has named its label; without a name y and label are."""
    path = stages(tmp_path / "a.csv", "age,stage,sex,ill")
    outline = outline_of(path, encode="onehot", label="ill")
    (tmp_path / "new.csv").write_text("y,age,stage,sex,label\n7,40,1,f,x\n8,41,2,m,x\n")
    assert read(tmp_path / "new.csv", outline).y is None
    (tmp_path / "new.csv").write_text("y,age,stage,sex,ill\n7,40,1,f,1\n8,41,2,m,0\n")
    own = read(tmp_path / "new.csv", outline)
    assert own.y is not None
    assert own.y.tolist() == [1, 0]
    usual = outline_of(stages(tmp_path / "b.csv", "age,stage,sex,label"), encode="onehot")
    (tmp_path / "new.csv").write_text("y,age,stage,sex\n1,40,1,f\n0,41,2,m\n")
    own = read(tmp_path / "new.csv", usual)
    assert own.y is not None
    assert own.y.tolist() == [1, 0]


def test_tables_without_a_header_are_predicted_with(tmp_path: Path) -> None:
    """By the place of the columns: as many as the features, or one more, the label."""
    outline = outline_of(stages(tmp_path / "a.csv", ""), encode="onehot", normalise="federated")
    new = tmp_path / "new.csv"
    new.write_text("40,1,f\n41,2,m\n")
    plain = read(new, outline)
    assert plain.y is None
    assert plain.x[:, 2:].tolist() == [[1, 0], [0, 1]]
    new.write_text("40,1,f,1\n41,2,m,0\n")
    scored = read(new, outline)
    assert torch.equal(scored.x, plain.x)
    assert scored.y is not None
    assert scored.y.tolist() == [1, 0]
    new.write_text("label,age,stage,sex\n1,40,1,f\n0,41,2,m\n")
    named = read(new, outline)
    assert torch.equal(named.x, plain.x)
    assert named.y is not None
    assert named.y.tolist() == [1, 0]
    new.write_text("40,1,f,1,5\n")
    with pytest.raises(InputError, match=r"with 3 columns as the run's features, or 4 with a label \(it has 5\)"):
        read(new, outline)
    new.write_text("40,old,f\n41,2,m\n42,3,f\n")
    with pytest.raises(InputError, match="column 2 = 'old': should be a number") as caught:
        read(new, outline)
    assert "--" not in str(caught.value), "predict has no such flag"


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    fed = federation(tmp_path / "a", impute="mean:site", normalise="federated")
    record = Outline.of(fed).to_dict()

    def broken(**changes: Any) -> dict[str, Any]:
        return {**record, "preprocessing": {**record["preprocessing"], **changes}}

    columns = record["preprocessing"]["columns"]
    for wrong in (
        broken(own=record["preprocessing"]["own"][:2]),
        broken(own=[{"mean": [0.0], "std": [1.0]}] * 3),
        broken(own=[{**one, "std": [0.0] * 6} for one in record["preprocessing"]["own"]]),
        broken(own=[{**one, "unseen": [6]} for one in record["preprocessing"]["own"]]),
        broken(rules={"impute": "mean"}),
        broken(columns={**columns, "categories": [None] * 3}),
        broken(columns={**columns, "categories": [None, None, ["f", "f"], None]}),
        broken(columns={**columns, "names": ["a\x1b", "b", "c", "d"]}),
        broken(label="label"),
    ):
        with pytest.raises(Unreadable):
            Outline.from_dict(wrong)
    assert isinstance(Outline.from_dict(record).preparation, Preparation)


def test_external_tables_are_prepared_alike(tmp_path: Path) -> None:
    hospitals(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.csv").write_text("age,bmi,sex,fixed,label\n50,26,f,7.1,1\n,30,x,7.1,0\n")
    rules = {"impute": "mean", "encode": "onehot"}
    experiment = fs.Experiment(data=str(tmp_path / "a"), external=str(tmp_path / "b"), normalise="federated", **rules)
    fed = federation_of(experiment)
    assert fed.external is not None
    assert fed.preparation is not None
    shared = fed.preparation.of(None)
    right = [(50 - shared.mean[0]) / shared.std[0], (26 - shared.mean[1]) / shared.std[1], 0, 1, 0, 0]
    assert fed.external[0][0].tolist() == pytest.approx(right, rel=1e-6)
    assert fed.external[0][1, [0, 2, 3, 4]].tolist() == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert fed.external[1].tolist() == [1, 0]
    site = fs.Experiment(data=str(tmp_path / "a"), external=str(tmp_path / "b"), normalise="site", **rules)
    with pytest.raises(InputError, match="left out where each site's samples are prepared by its own statistics"):
        federation_of(site)
