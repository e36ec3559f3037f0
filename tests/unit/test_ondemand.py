"""Samples on disk that are read when they are needed: the numbers are those of samples in memory, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import vmap

import fedstill as fs
from fedstill.core.errors import InputError
from fedstill.data import Preprocessing, cached, load, mapped
from fedstill.data.samples import Samples, batches_at_once, pieces
from fedstill.edge import data_manager
from fedstill.edge.data_manager import DataManager, join
from fedstill.scores.external import with_external

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cached.FOLDER, str(tmp_path / "decoded"))
    return tmp_path / "decoded"


def paint(root: Path, count: int = 90, size: tuple[int, int] = (7, 9), seed: int = 0, splits=("",)) -> Path:
    """Random colour images in class folders; a class's images are brighter in one channel."""
    Image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(seed)
    for split in splits:
        for i in range(count):
            pixels = rng.integers(0, 120, (size[1], size[0], 3))
            pixels[..., i % 3] += 100
            path = root / split / f"class {i % 3}" / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return root


@pytest.fixture
def images(tmp_path):
    return paint(tmp_path / "images")


def both(source, **options):
    """The data set in memory and on disk."""
    return [load(source, memory_map=mode, **options) for mode in ("off", "on")]


def samples_of(federation):
    return [x[:] for c in federation.clients for x in (c.x_train, c.x_test, c.x_val) if x is not None]


# ---- the data set ----------------------------------------------------------------------------------------------------


def test_images_on_disk_are_the_same_data_set(images, cache):
    memory, disk = both(images)
    assert mapped.mapping(memory.x) is None
    assert mapped.mapping(disk.x) is not None
    assert np.array_equal(memory.x, disk.x)
    assert (memory.mean, memory.std) == (disk.mean, disk.std)
    assert memory.checksum() == disk.checksum()
    assert torch.equal(memory.tensors()[0], disk.tensors()[0])
    rows = np.array([5, 5, 0, 89])
    assert torch.equal(memory.rows(rows), disk.rows(rows)[:])
    assert isinstance(disk.rows(rows), Samples)
    assert [p.suffix for p in cache.iterdir()] == [".npy"]
    assert (cache.stat().st_mode & 0o777, next(cache.iterdir()).stat().st_mode & 0o777) == (0o700, 0o600)


def test_gathering_is_normalising(images):
    """Against Dataset.tensor, for rows, slices, tables of rows, under vmap, in both dtypes."""
    disk = load(images, memory_map="on")
    order = np.random.default_rng(1).permutation(90)
    samples, oracle = disk.rows(order), disk.tensor(disk.x[order])
    table = torch.tensor([[3, 1, 1], [0, 89, 7]])
    for x, want in ((samples, oracle), (samples.to(torch.float64), oracle.double())):
        assert torch.equal(x[table], want[table])
        assert torch.equal(x[4:11], want[4:11])
        assert torch.equal(vmap(lambda rows, x=x: x[rows])(table), want[table])
        assert torch.equal(torch.cat(list(pieces(x))), want)
        assert (x.shape, x.dtype, len(x), x.device) == (want.shape, want.dtype, 90, CPU)
        assert torch.equal(x.at(table[0]).at(slice(1, 3))[:], want[table[0]][1:3])
        assert torch.equal(x.over(x.tensors())[table], want[table])
    table_of_values = Samples(samples.raw, samples.values)[torch.from_numpy(order)]  # as on a GPU
    assert torch.equal(table_of_values, oracle)


@pytest.mark.parametrize("size", [1, 7, 50])
def test_batches_begin_where_they_would_in_one_gather(images, size):
    samples = load(images, memory_map="on").rows()
    bytes_each = samples.shape[1:].numel() * 4
    assert batches_at_once(samples, size, 90) * size * bytes_each % 64 == 0
    assert batches_at_once(samples[:], size, 90) * size >= 90


@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "dirichlet:0.5", "clients": 4},
        {"partition": "iid", "clients": 3, "split": "70/10/20"},
        {"partition": "iid", "clients": 3, "split": "official"},
        {"partition": "iid", "clients": 3, "pool": "train"},
    ],
    ids=["pooled", "validation", "official", "train"],
)
def test_federations_are_the_same(tmp_path, settings):
    paint(tmp_path / "i", 60, splits=("train", "test"))
    memory, disk = (fs.Federation.from_dataset(data, seed=3, **settings) for data in both(tmp_path / "i"))
    assert isinstance(disk.clients[0].x_train, Samples)
    assert (memory.hash, memory.checksum(), memory.shape) == (disk.hash, disk.checksum(), disk.shape)
    assert (memory.counts() == disk.counts()).all()
    for a, b in zip(samples_of(memory), samples_of(disk), strict=True):
        assert torch.equal(a, b)
    if memory.test is not None:
        assert torch.equal(memory.test[0], disk.test[0][:])
    share, own = memory.only([1], tests=True), disk.only([1], tests=True)
    assert share.checksum() == own.checksum()
    for a, b in zip(samples_of(share), samples_of(own), strict=True):
        assert torch.equal(a, b)
    manager, other = (DataManager(federation, CPU, torch.float32) for federation in (share, own))
    assert torch.equal(manager.test.x[:], other.test.x[:])


@pytest.mark.parametrize("normalise", ["none", "site", "federated"])
def test_images_that_sites_scale_are_the_same(images, normalise):
    """Rows of one file stand for other numbers at each site, where each scales its own."""
    rules = Preprocessing(normalise=normalise)
    memory, disk = (
        fs.Federation.from_dataset(data, partition="dirichlet:0.5", clients=3, seed=3)
        for data in both(images, preprocessing=rules)
    )
    assert isinstance(disk.clients[0].x_train, Samples)
    assert memory.checksum() == disk.checksum()
    for a, b in zip(samples_of(memory), samples_of(disk), strict=True):
        assert torch.equal(a, b)
    first, second = (disk.clients[k].x_train.values for k in (0, 1))
    assert torch.equal(first, second) == (normalise != "site")
    managers = [DataManager(federation, CPU, torch.float32) for federation in (memory, disk)]
    assert torch.equal(*(manager.train.x[:] for manager in managers))
    same_runs(*(trained(federation, "stacked") for federation in (memory, disk)))


# ---- runs ------------------------------------------------------------------------------------------------------------


def trained(federation, engine, method=None, model="lenet5", **settings):
    from fedstill import models

    net = models.build(model, federation.shape, federation.classes, 0)
    usual = {"rounds": 2, "epochs": 2, "batch_size": 7, "lr": 0.05, "engine": engine}
    return fs.simulate(method or fs.PFedSD(), model=net, data=federation, **{**usual, **settings})


def same_runs(a, b):
    timed = ("seconds", "_seconds")
    strip = [[{k: v for k, v in r.items() if not k.endswith(timed)} for r in run.history] for run in (a, b)]
    assert strip[0] == strip[1]
    for k in range(a.task.clients):
        for name, value in a.served(k).items():
            assert torch.equal(value, b.served(k)[name]), (k, name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", ["lenet5", "mlp"])
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_runs_are_the_same_to_the_bit(tmp_path, engine, model, dtype):
    source = f"{paint(tmp_path / 'i', 60)}@12"
    federations = [fs.Federation.from_dataset(data, partition="dirichlet:1", clients=3) for data in both(source)]
    same_runs(*(trained(federation, engine, model=model, dtype=dtype, new=True) for federation in federations))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (fs.PerFedAvg(), {"model": "mlp", "engine": "one"}),
        (fs.FedRoD(), {"engine": "stacked"}),
        (fs.FedFomo(), {"engine": "one"}),
        (fs.SCAFFOLD(), {"engine": "stacked", "compile": "traced"}),
        (fs.FedAvg(), {"engine": "one", "augment": "flip", "workers": 2}),
        (fs.FedAvg(), {"engine": "one", "privacy": "local", "noise_multiplier": 1.0, "clip_norm": 1.0}),
        (fs.FedAvg(), {"engine": "one", "average": "fltrust", "root_samples": 5}),
        (fs.FedAvg(), {"engine": "one", "attack": "backdoor", "attackers": 1}),
        (fs.FedAvg(), {"engine": "stacked", "attack": "label-flip", "attackers": 1}),
    ],
    ids=lambda value: value.id if isinstance(value, fs.Method) else "-".join(map(str, value.values())),
)
def test_whatever_reads_samples_gives_the_same(tmp_path, method, settings):
    source = f"{paint(tmp_path / 'i', 60, splits=('train', 'test'))}@12"
    split = "70/10/20" if isinstance(method, fs.FedFomo) else "80/20"
    federations = [
        fs.Federation.from_dataset(data, partition="iid", clients=4, split=split, pool="train") for data in both(source)
    ]
    same_runs(*(trained(federation, method=method, **settings) for federation in federations))


def test_external_and_averaged_scores_are_the_same(tmp_path):
    clients, other = paint(tmp_path / "a", 45), paint(tmp_path / "b", 30, seed=5)
    runs = []
    for mode in ("off", "on"):
        federation = fs.Federation.from_dataset(load(clients, memory_map=mode), partition="iid", clients=3)
        federation = with_external(federation, str(other), str(clients), None, mode)
        assert isinstance(federation.external[0], Samples) == (mode == "on")
        runs.append(trained(federation, "one", averaged=True, new=True, forgetting=True, fine_tune=1))
    assert runs[0].after == runs[1].after
    assert "external" in runs[0].after


def test_runs_side_by_side_share_the_file(images):
    """Two divisions of the same samples are rows of one file; nothing is copied."""
    data = load(images, memory_map="on")
    federations = [fs.Federation.from_dataset(data, partition="iid", clients=3, seed=seed) for seed in (0, 1, 0)]
    managers = [DataManager(federation, CPU, torch.float32) for federation in federations]
    joined = join(managers).train
    assert joined.x.raw.data_ptr() == managers[0].train.x.raw.data_ptr()
    assert len(joined.x) == len(managers[0].train.x) + len(managers[1].train.x)  # the third is the first
    for k, federation in enumerate(federations):
        for c in range(3):
            assert torch.equal(joined.of(3 * k + c)[0][:], federation.clients[c].x_train[:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_gpu_gets_is_what_it_gets_of_samples_in_memory(images, tmp_path, dtype):
    """Bytes and a table; here both lie on the CPU."""
    memory, disk = both(images)
    bytes_ = data_manager._uploaded(disk.rows(np.arange(89, -1, -1)), CPU, dtype)
    packed = data_manager._packed(memory.tensor(memory.x[::-1]), dtype, memory.mean, memory.std)
    assert bytes_.pages is None
    assert torch.equal(bytes_.raw, packed.raw)
    assert torch.equal(bytes_.values, packed.values)
    numbers = load(save(tmp_path / "a", x=KINDS["numbers"], y=np.arange(40) % 3), memory_map="on")
    assert torch.equal(data_manager._uploaded(numbers.rows(), CPU, dtype).raw, numbers.tensors()[0].to(dtype))


# ---- what is kept on disk --------------------------------------------------------------------------------------------


def test_images_are_decoded_once_until_one_changes(images, cache, monkeypatch):
    from fedstill.data import images as module

    load(images, memory_map="on")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_opened", lambda *_: pytest.fail("an image was opened again"))
        load(images, memory_map="on")
    Image = pytest.importorskip("PIL.Image")
    changed = sorted(images.rglob("*.png"))[0]
    Image.new("RGB", (7, 9), (255, 0, 0)).save(changed)
    again = load(images, memory_map="on")
    assert again.x[0, 0].min() == 255
    assert np.array_equal(again.x, load(images, memory_map="off").x)
    assert len(list(cache.iterdir())) == 2


def test_an_image_that_changes_while_it_is_read_is_noticed(images, cache, monkeypatch):
    from fedstill.data import images as module

    real = module._pixels

    def disturbed(*words):
        (images / "class 0" / "000.png").touch()
        return real(*words)

    monkeypatch.setattr(module, "_pixels", disturbed)
    with pytest.raises(InputError, match="one of them has changed"):
        load(images, memory_map="on")
    assert list(cache.iterdir()) == []


def make(letter, value=7):
    return cached.make(64 * letter, np.uint8, (1000,), lambda out: out.fill(value))


def test_what_is_unused_for_the_longest_time_goes(cache, monkeypatch):
    def there():
        return sorted(path.stem[0] for path in cache.iterdir())

    monkeypatch.setenv(cached.SIZE, "3K")
    first = make("a", 1)
    make("b", 2)
    cached.find(64 * "a")  # used after b
    make("c", 3)
    assert there() == ["a", "c"]
    cached.find(64 * "c")
    make("d", 4)
    assert there() == ["c", "d"]
    assert (first == 1).all()  # who reads it goes on reading
    monkeypatch.setenv(cached.SIZE, "1K")
    with pytest.raises(InputError, match=r"FEDSTILL_CACHE_SIZE = 1.0 kB: should be at least 1.1 kB"):
        make("e", 5)


def test_nothing_but_what_it_wrote_is_deleted(cache, monkeypatch):
    cache.mkdir()
    mine = [cache / "x.npy", cache / ".notes.1.part", cache / f"{64 * 'g'}.npy"]
    for path in mine:
        path.write_bytes(bytes(5000))
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], check=True, capture_output=True, text=True
    )
    left = [cache / f".{64 * 'a'}.{pid}.part" for pid in (int(ended.stdout), os.getpid())]
    for path in left:
        path.write_bytes(b"")
    monkeypatch.setenv(cached.SIZE, "2K")
    make("b")
    make("c")
    assert sorted(cache.iterdir()) == sorted([*mine, left[1], cache / f"{64 * 'c'}.npy"])


def test_a_file_that_is_not_whole_is_made_again(cache):
    make("a")
    path = cache / f"{64 * 'a'}.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert cached.find(64 * "a") is None
    assert (make("a") == 7).all()
    with pytest.raises(RuntimeError):
        cached.make(64 * "b", np.uint8, (10,), lambda out: (_ for _ in ()).throw(RuntimeError))
    assert list(cache.iterdir()) == [path]  # nothing is left behind


def test_a_cache_that_cannot_be_written_is_named(tmp_path, images, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cached.FOLDER, str(tmp_path / "file" / "in"))
    with pytest.raises(InputError, match="FEDSTILL_CACHE"):
        load(images, memory_map="on")


def test_auto_leaves_on_disk_what_would_take_half_of_the_memory(images, monkeypatch):
    numbers = load(images, memory_map="off").x.size
    monkeypatch.setenv("FEDSTILL_MEMORY", str(2 * mapped.TIMES * numbers))
    assert mapped.mapping(load(images).x) is None
    monkeypatch.setenv("FEDSTILL_MEMORY", str(2 * mapped.TIMES * numbers - 2))
    assert mapped.mapping(load(images).x) is not None
    with pytest.raises(InputError, match="memory_map = 'yes'"):
        load(images, memory_map="yes")


# ---- npy files -------------------------------------------------------------------------------------------------------


def save(folder: Path, **named) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in named.items():
        np.save(folder / f"{name}.npy", values)
    return folder


RNG = np.random.default_rng(7)
KINDS = {
    "images": RNG.integers(0, 256, (40, 3, 5, 4), np.uint8),
    "grey": RNG.integers(0, 256, (40, 5, 4), np.uint8),
    "channels last": RNG.integers(0, 256, (40, 5, 4, 3), np.uint8),
    "numbers": RNG.normal(size=(40, 6)).astype(np.float32),
    "doubles": RNG.normal(size=(40, 6)),
    "bytes": RNG.integers(0, 256, (40, 6), np.uint8),
    "ids": RNG.integers(0, 50, (40, 6), np.int32),
    "columns first": np.asfortranarray(RNG.normal(size=(40, 6)).astype(np.float32)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_npy_files_are_the_same_data_set(tmp_path, kind):
    x, y = KINDS[kind], np.arange(40) % 3
    alone = save(tmp_path / "alone", x=x, y=y)
    tested = save(tmp_path / "tested", x=x, y=y, test_x=x[:10], test_y=y[:10])
    for name, part in (("berlin", slice(0, 15)), ("lyon", slice(15, 40))):
        save(tmp_path / "silos" / name, x=x[part], y=y[part])
    np.savez(tmp_path / "same.npz", x=x, y=y)
    oracle = load(tmp_path / "same.npz")
    for folder in (alone, tested, tmp_path / "silos"):
        memory, disk = both(folder)
        assert mapped.mapping(disk.x) is not None
        assert memory.checksum() == disk.checksum()
        assert np.array_equal(memory.x, oracle.x)
        assert np.array_equal(memory.y, oracle.y)
        settings = {"partition": "iid" if folder != tmp_path / "silos" else "owner", "clients": None, "seed": 1}
        settings["clients"] = 3 if settings["partition"] == "iid" else None
        a, b = (fs.Federation.from_dataset(data, **settings) for data in (memory, disk))
        assert (a.hash, a.checksum()) == (b.hash, b.checksum())
        assert isinstance(b.clients[0].x_train, Samples)
    assert both(tmp_path / "silos")[1].groups == ("berlin", "lyon")


def test_one_npy_file_stays_where_it_is(tmp_path, cache):
    folder = save(tmp_path / "a", x=KINDS["images"], y=np.arange(40) % 3, owner=np.arange(40) % 4 + 7)
    data = load(folder, memory_map="on")
    assert not cache.exists()
    assert data.groups == ("7", "8", "9", "10")
    federation = fs.Federation.from_dataset(data, partition="owner", clients=None)
    assert federation.names == ("7", "8", "9", "10")


def test_runs_on_npy_files_are_the_same(tmp_path):
    folder = save(tmp_path / "a", x=KINDS["doubles"], y=np.arange(40) % 3)
    federations = [fs.Federation.from_dataset(data, partition="iid", clients=3) for data in both(folder)]
    for engine in ("one", "stacked"):
        same_runs(*(trained(federation, engine, model="mlr") for federation in federations))


def test_what_is_wrong_with_npy_files_is_named(tmp_path):
    x, y = KINDS["numbers"], np.arange(40) % 3

    def refused(folder, says):
        for mode in ("on", "off"):
            with pytest.raises(InputError, match=says) as caught:
                load(folder, memory_map=mode)
            assert "\n" not in str(caught.value)

    refused(save(tmp_path / "no labels", x=x), r"y\.npy.*a file that exists")
    refused(save(tmp_path / "fewer", x=x, y=y[:5]), "one label for each of the 40")
    refused(save(tmp_path / "objects", x=x, y=np.array([None] * 40)), "nothing is unpickled")
    refused(save(tmp_path / "nan", x=np.where(x > 2, np.nan, x), y=y), "NaN")
    refused(save(tmp_path / "owners", x=x, y=y, owner=np.arange(39)), r"owner\.npy.*each of the 40")
    short = save(tmp_path / "short", x=x, y=y) / "x.npy"
    short.write_bytes(short.read_bytes()[:-4])
    refused(short.parent, "bytes long as its header says")
    long = save(tmp_path / "long", x=x, y=y) / "x.npy"  # declares far more than it has
    long.write_bytes(long.read_bytes().replace(b"(40, 6)", b"(9" + b"0" * 3 + b", 6)"[:-1] + b")", 1))
    refused(long.parent, r"x\.npy")
    save(tmp_path / "silos" / "a", x=x, y=y)
    save(tmp_path / "silos" / "b", x=x[:, :5], y=y)
    refused(tmp_path / "silos", r"samples of shape \(6,\)")
    save(tmp_path / "some" / "a", x=x, y=y, test_x=x, test_y=y)
    save(tmp_path / "some" / "b", x=x, y=y)
    refused(tmp_path / "some", r"b.test_x\.npy.*as in a")


# ---- memory ----------------------------------------------------------------------------------------------------------

CHILD = """
import sys, torch
import fedstill as fs
from pathlib import Path
from fedstill.data import load
from fedstill.data import mapped
from fedstill.edge.data_manager import DataManager
mapped.BUDGET //= 8
def peak():
    return 1024 * next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l)
small, large = sys.argv[1:]
def work(folder):
    federation = fs.Federation.from_dataset(load(folder, memory_map="on"), partition="iid", clients=20)
    federation.checksum()
    data = DataManager(federation, torch.device("cpu"), torch.float32)
    for k in range(20):
        x, y = data.train.of(k)
        for rows in torch.randperm(len(y)).split(50):
            x[rows]
work(small)
before = peak()
work(large)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_data(tmp_path):
    """300 MB of bytes, 1.2 GB as float32, with all steps up to an epoch: at most 200 MB above a small set."""
    for name, count in (("small", 200), ("large", 24_576)):
        folder = save(tmp_path / name, y=np.arange(count) % 10)
        x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, 3, 64, 64))
        x[:, 0, 0, 0] = np.arange(count) % 256  # the rest are holes, which take no disk
        del x
    command = [sys.executable, "-c", CHILD, str(tmp_path / "small"), str(tmp_path / "large")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 200 << 20
