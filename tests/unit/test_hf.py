"""Folders that save_to_disk wrote, read without the package that wrote them; the package is the oracle."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedstill as fs
from fedstill.core.errors import InputError
from fedstill.data import arrow, cached, load
from fedstill.run import prepare
from fedstill.run.experiment import Experiment

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")
datasets.disable_progress_bars()
N = 60
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (N, 9, 8), np.uint8)
SITES = [("berlin", "lyon", "porto")[i % 3] for i in range(N)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cached.FOLDER, str(tmp_path / "decoded"))


def pictures(colour=False):
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "site": datasets.Value("string"),
    }
    images = [Image.fromarray(p).convert("RGB" if colour and i == N - 1 else "L") for i, p in enumerate(PIXELS)]
    return datasets.Dataset.from_dict(
        {"image": images, "label": [i % 2 for i in range(N)], "site": SITES}, features=datasets.Features(features)
    )


def table():
    columns = {"age": list(range(N)), "bmi": RNG.normal(size=N).tolist(), "site": [i % 3 + 5 for i in range(N)]}
    return datasets.Dataset.from_dict({**columns, "outcome": [("ill", "well")[i % 2] for i in range(N)]})


def saved(data, path, **options):
    data.save_to_disk(str(path), **options)
    return f"hf:{path}"


def both(source, **options):
    memory, disk = (load(source, memory_map=mode, **options) for mode in ("off", "on"))
    assert memory.checksum() == disk.checksum()
    assert (memory.mean, memory.labels, memory.groups) == (disk.mean, disk.labels, disk.groups)
    return disk


def refused(says, source, **options):
    with pytest.raises(InputError, match=says) as caught:
        load(source, **options)
    assert "\n" not in str(caught.value)


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_images_by_owner(tmp_path, shards):
    data = both(saved(pictures(), tmp_path / "d", num_shards=shards), owner="site")
    assert np.array_equal(data.x[:, 0], PIXELS)
    assert (data.labels, data.groups) == (("cat", "dog"), ("berlin", "lyon", "porto"))
    assert data.y.tolist() == [i % 2 for i in range(N)]
    assert [data.groups[k] for k in data.owner] == SITES


def test_one_image_in_colour_makes_all_of_them_so(tmp_path):
    data = both(saved(pictures(colour=True), tmp_path / "d") + "@6")
    assert data.x.shape == (N, 3, 6, 6)


def test_a_table_and_its_tests(tmp_path):
    whole = table()
    source = saved(datasets.DatasetDict(train=whole, test=whole.select(range(20))), tmp_path / "d")
    data = both(source, label="outcome", owner="site")
    assert data.x[:, 0].tolist() == whole["age"][:]
    assert data.x[:, 1].tolist() == np.float32(whole["bmi"][:]).tolist()
    assert data.x.shape[1] == 2  # neither label nor owner
    assert (data.labels, data.groups, data.classes) == (("ill", "well"), ("5", "6", "7"), 2)
    assert np.array_equal(data.test_x, data.x[:20])
    assert np.array_equal(data.test_owner, data.owner[:20])
    one = both(source, label="outcome", input="bmi")
    assert (one.shape, one.owner) == ((1,), None)
    ages = both(source, label="age", input="bmi", objective="regression")
    assert ages.objective == "regression"


def test_ids_and_arrays(tmp_path):
    ids = RNG.integers(0, 50, (N, 7))
    data = both(
        saved(
            datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": [i % 3 for i in range(N)]}), tmp_path / "i"
        )
    )
    assert data.x.dtype == np.int64
    assert np.array_equal(data.x, ids)
    cubes = RNG.integers(0, 256, (N, 8, 6, 3), np.uint8)
    features = datasets.Features({"x": datasets.Array3D((8, 6, 3), "uint8"), "y": datasets.Value("int64")})
    made = datasets.Dataset.from_dict({"x": cubes.tolist(), "y": [i % 3 for i in range(N)]}, features=features)
    data = both(saved(made, tmp_path / "a"))
    assert np.array_equal(data.x, cubes.transpose(0, 3, 1, 2))


def test_an_experiment_by_owner(tmp_path):
    source = saved(pictures(), tmp_path / "d")
    experiment = Experiment(data=source, owner="site", label="label", rounds=1, model="mlr", memory_map="on")
    federation = prepare.federation_of(experiment)
    assert (federation.names, federation.labels) == (("berlin", "lyon", "porto"), ("cat", "dog"))
    fs.run(experiment, out=tmp_path / "run")
    again = Experiment.from_toml(tmp_path / "run" / "experiment.toml")
    assert (again.data, again.owner, again.label, again.memory_map) == (source, "site", "label", "on")
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert partition["names"] == ["berlin", "lyon", "porto"]


def test_live_data_sets_are_what_is_saved(tmp_path):
    whole = pictures()
    parts = {site: whole.filter(lambda row, site=site: row["site"] == site) for site in ("berlin", "lyon", "porto")}
    live = fs.Federation.from_datasets(parts)
    assert (live.names, live.labels) == (("berlin", "lyon", "porto"), ("cat", "dog"))
    stored = load(saved(whole, tmp_path / "d"), owner="site")
    for k, client in enumerate(live.clients):
        mine = torch.cat([client.x_train, client.x_test])
        own = torch.from_numpy(stored.x[stored.owner == k]).float() / 255
        assert sorted(mine.flatten(1).tolist()) == sorted(own.flatten(1).tolist())
    split = fs.Federation.from_datasets({"a": datasets.DatasetDict(train=whole, test=whole.select(range(5)))})
    assert (split.sizes("train"), split.sizes("test")) == ((N,), (5,))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_named(tmp_path):
    source = saved(table(), tmp_path / "d")
    refused("label = 'result': should be a column", source, label="result")
    refused("owner = 'place': should be a column", source, label="outcome", owner="place")
    refused(r"label = \(none\)", source)
    refused("values of type string: should be numbers", source, label="age")
    refused("written by datasets.Dataset.save_to_disk", f"hf:{tmp_path}")
    refused("of a folder that exists", f"hf:{tmp_path}/none")
    refused("owner = 'site': should be left out with digits", "digits", owner="site")
    gaps = datasets.Dataset.from_dict({"x": [[1.0], None, [2.0]], "label": [0, 1, 0]})
    refused("1 gaps: should be a value in every row", saved(gaps, tmp_path / "gaps"))
    uneven = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "label": [0, 1]})
    refused("lists of 1 to 2 values: should be of one length", saved(uneven, tmp_path / "uneven"))
    only = datasets.DatasetDict(validation=table())
    refused("whose splits have train", saved(only, tmp_path / "only"))


def test_an_image_that_is_a_path_is_never_opened(tmp_path):
    """A saved set may name any file of this machine, or an address."""
    import pyarrow as pa

    Image.new("L", (4, 4)).save(tmp_path / "secret.png")
    source = saved(pictures(), tmp_path / "d")
    images = pa.array(
        [{"bytes": None, "path": str(tmp_path / "secret.png")}] * 4,
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    )
    rows = pa.table({"image": images, "label": [0, 1, 0, 1]})
    with (
        pa.OSFile(str(next((tmp_path / "d").glob("*.arrow"))), "wb") as file,
        pa.ipc.new_stream(file, rows.schema) as stream,
    ):
        stream.write_table(rows)
    refused("4 images that are paths", source)


@pytest.mark.parametrize(
    "name", ["../secret.arrow", "/etc/passwd", "a/b.arrow", "state.json", "", "x" * 5000 + ".arrow"]
)
def test_a_list_of_files_stays_in_the_folder(tmp_path, name):
    source = saved(table(), tmp_path / "d")
    state = json.loads((tmp_path / "d" / "state.json").read_text())
    (tmp_path / "d" / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": name}]}))
    refused("arrow", source, label="outcome")


def test_a_batch_is_not_longer_than_the_file(tmp_path):
    """Sizes are looked at before anything is allocated."""
    source = saved(table(), tmp_path / "d")
    path = next((tmp_path / "d").glob("*.arrow"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    refused("none of which is longer than the file|a whole Arrow stream", source, label="outcome")
    first = 8 + struct.unpack_from("<I", whole, 4)[0]  # the batch's message follows the schema's
    for length in (0x7FFFFFFF, arrow.LONGEST + 1):
        path.write_bytes(whole[: first + 4] + struct.pack("<I", length) + whole[first + 8 :])
        refused("a whole Arrow stream", source, label="outcome")
    path.write_bytes(b"")
    refused("a whole Arrow stream", source, label="outcome")


def test_compressed_batches_are_refused(tmp_path):
    """One of them could say that it expands to anything."""
    import pyarrow as pa

    source = saved(table(), tmp_path / "d")
    path = next((tmp_path / "d").glob("*.arrow"))
    rows = pa.table({"age": [1.0] * 1000, "outcome": ["a", "b"] * 500})
    for codec, says in (("zstd", "batches that are not compressed"), (None, None)):
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_stream(file, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream,
        ):
            stream.write_table(rows)
        if says:
            refused(says, source, label="outcome", input="age")
        else:
            assert len(load(source, label="outcome", input="age")) == 1000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_one_line_or_harmless(tmp_path_factory, data):
    """Bytes of the stream are changed, dropped or repeated."""
    folder = tmp_path_factory.getbasetemp() / "hf-damaged"
    if not folder.exists():
        saved(table(), folder)
        shutil.copy(next(folder.glob("*.arrow")), folder / "whole")
    raw = bytearray((folder / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "repeat", "large"]))
        if kind == "flip":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[at : at + data.draw(st.integers(1, 64))]
        elif kind == "repeat":
            raw[at:at] = raw[at : at + 16]
        else:
            raw[at : at + 8] = b"\xff\xff\xff\xff\xff\xff\xff\x7f"
    next(folder.glob("*.arrow")).write_bytes(raw)
    said = ""
    try:
        load(f"hf:{folder}", label="outcome", owner="site")
    except InputError as error:
        said = str(error)
    assert "\n" not in said
