"""The bank of memories, against a dictionary of clones: the same bits, whatever the tiers hold."""

import contextlib
import gc
import random
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import tree
from fedstill.core.errors import TrainingError
from fedstill.edge.model_store import store as model_store
from fedstill.edge.model_store.store import ModelStore
from fedstill.run.journal import Journal

PER_SAMPLE = frozenset({"logits", "soft"})
CLIENTS = 6
BUDGETS = [None, 0, 700, 3000, 100_000]


def memory(seed: int, rows: int = 0):
    """Four dtypes, nesting, an empty branch, a scalar, a leaf without entries, and entries by sample."""
    g = torch.Generator().manual_seed(seed)
    return {
        "v": {"weight": torch.randn(3, 5, generator=g), "count": torch.randint(99, (), generator=g)},
        "soft": {"a": torch.randn(rows, 2, generator=g), "b": torch.randint(2, (rows,), generator=g).bool()},
        "fisher": {},
        "last": torch.randn(7, generator=g, dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "logits": torch.randn(rows, 3, generator=g),
        "mask": torch.randint(2, (5,), generator=g).bool(),
        "seen": torch.tensor(float(seed)),
    }


def same(a, b) -> bool:
    if tree.outline(a) != tree.outline(b) or list(a) != list(b):
        return False
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for (_, x), (_, y) in pairs)


def stacked(memories, rows):
    return tree.stack([tree.fit_rows(m, PER_SAMPLE, rows) for m in memories])


def play(seed: int, steps: int, **budgets) -> None:
    """Random calls; after each, what it gives and what one client keeps are the oracle's."""
    draw = random.Random(seed)
    oracle, initial, handed = {}, memory(0), []
    store = ModelStore(initial, **budgets)
    try:
        for step in range(1, steps + 1):
            some = draw.sample(range(CLIENTS), draw.randint(1, CLIENTS))
            call = draw.choice(["put", "put", "get", "gather", "scatter", "scatter", "prefetch", "items"])
            if call == "put":
                new = memory(step, draw.randint(0, 4))
                store.put(some[0], new)
                oracle[some[0]] = tree.clone(new)
                for _, leaf in tree.leaves(new):
                    leaf.zero_()
            elif call == "get":
                tree_now, right = store.get(some[0]), oracle.get(some[0], initial)
                assert same(tree_now, right)
                handed.append((tree_now, tree.clone(right)))
            elif call == "gather":
                rows = draw.randint(0, 5)
                given_back = store.gather(some, PER_SAMPLE, rows)
                assert same(given_back, stacked([oracle.get(k, initial) for k in some], rows))
                for _, leaf in tree.leaves(given_back):
                    leaf.zero_()
            elif call == "scatter":
                rows = draw.randint(0, 4)
                sizes = [draw.randint(0, 5) for _ in some]
                new = tree.stack([memory(100 * step + i, rows) for i in range(len(some))])
                store.scatter(some, new, PER_SAMPLE, sizes)
                for i, (k, size) in enumerate(zip(some, sizes, strict=True)):
                    oracle[k] = tree.fit_rows(tree.unstack(new, i), PER_SAMPLE, size)
                for _, leaf in tree.leaves(new):
                    leaf.zero_()
            elif call == "prefetch":
                store.prefetch(some)
            else:
                kept = list(store.items())
                assert [k for k, _ in kept] == sorted(oracle)
                assert all(same(m, oracle[k]) for k, m in kept)
            check_books(store)
            k = draw.randrange(CLIENTS)
            assert same(store.get(k), oracle.get(k, initial))
        assert all(same(given, right) for given, right in handed)  # later calls do not reach what was handed out
    finally:
        store.close()


def check_books(store: ModelStore) -> None:
    """What the tiers count is what the rows have."""
    rows = store._rows.values()
    assert store._device.used == sum(r.layout.bytes for r in rows if r.device is not None)
    assert store._host.used == sum(r.layout.bytes for r in rows if r.host is not None)
    assert store._leaving == sum(r.layout.bytes for r in rows if r.leaving)
    assert store._device.used <= store._device.limit
    assert all(r.device is not None or r.host is not None or r.file is not None for r in rows)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), device=st.sampled_from(BUDGETS), host=st.sampled_from(BUDGETS))
def test_the_bank_equals_a_dictionary(seed: int, device: int | None, host: int | None) -> None:
    play(seed, 25, device_bytes=device, host_bytes=host)


@pytest.mark.parametrize("device", BUDGETS)
@pytest.mark.parametrize("host", [0, 1500])
def test_a_long_sequence_equals_a_dictionary(device: int | None, host: int, tmp_path: Path) -> None:
    play(7, 250, device_bytes=device, host_bytes=host, folder=tmp_path)
    assert not list(tmp_path.iterdir())


class _LateStream:
    """A stream in slow motion: its copies are made when somebody waits for them, and not before."""

    current, lock = None, threading.RLock()

    def __init__(self) -> None:
        self.queue, self.made = [], 0

    def wait_event(self, event) -> None:
        self.add(event.synchronize)

    def record_event(self):
        with self.lock:
            return _LateEvent(self, self.made + len(self.queue))

    def add(self, job) -> None:
        self.queue.append(job)

    def run(self, upto: int) -> None:
        with self.lock:
            while self.made < upto:
                self.queue.pop(0)()
                self.made += 1


class _PromptStream(_LateStream):
    """The stream that computes: what is asked of it is done at once."""

    def add(self, job) -> None:
        job()


class _LateEvent:
    def __init__(self, stream: _LateStream, upto: int) -> None:
        self.stream, self.upto = stream, upto

    def synchronize(self) -> None:
        self.stream.run(self.upto)

    def query(self) -> bool:
        return self.stream.made >= self.upto


class _LateGpu:
    def __init__(self, device: torch.device) -> None:
        self.device, self.prompt = torch.device("cpu"), _PromptStream()
        self.up, self.down = _LateStream(), _LateStream()

    def current(self) -> _LateStream:
        return self.prompt


@pytest.fixture
def late_gpu(monkeypatch):
    """Device "cuda" as ordinary memory whose copies to and from the host come as late as they may."""
    empty, copy = torch.empty, torch.Tensor.copy_

    @contextlib.contextmanager
    def on(stream):
        _LateStream.current = stream
        yield
        _LateStream.current = None

    def copy_(into, source, non_blocking=False):
        stream = _LateStream.current
        if stream is None or threading.current_thread() is not threading.main_thread():
            return copy(into, source)
        stream.add(lambda: copy(into, source))
        return into

    monkeypatch.setattr(model_store, "Gpu", _LateGpu)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **kinds: empty(*shape, **kinds))


@pytest.mark.parametrize("device", [0, 700, 3000, 100_000])
@pytest.mark.parametrize("host", [0, 1500, 4000, 100_000])
def test_late_copies_equal_a_dictionary(device: int, host: int, late_gpu) -> None:
    for seed in range(4):
        play(seed, 80, device="cuda", device_bytes=device, host_bytes=host)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", [0, 3000, None])
def test_a_bank_on_a_gpu_gives_trees_there(device: int | None) -> None:
    with_gpu = ModelStore(memory(0), device="cuda", device_bytes=device, host_bytes=2000)
    for k in range(CLIENTS):
        with_gpu.put(k, memory(k, k))
    with_gpu.prefetch(range(CLIENTS))
    got = with_gpu.gather(range(CLIENTS), PER_SAMPLE, 4)
    assert all(leaf.is_cuda for _, leaf in tree.leaves(got))
    assert same(tree.to(got, "cpu"), stacked([memory(k, k) for k in range(CLIENTS)], 4))


def test_rows_pass_through_every_tier() -> None:
    size = ModelStore(memory(0))._initial.layout.bytes
    store = ModelStore(memory(0), device_bytes=2 * size, host_bytes=3 * size)
    for k in range(10):
        store.put(k, memory(k))
    found = store.stats()
    assert found["device"] == {"clients": 2, "bytes": 2 * size}
    assert 1 <= found["host"]["clients"] <= 3
    assert found["disk"]["clients"] >= 5
    assert all(same(store.get(k), memory(k)) for k in range(10))
    store.close()


def test_a_client_that_kept_nothing_costs_nothing() -> None:
    store = ModelStore(memory(3))
    assert same(store.get(8), memory(3))
    assert same(store.gather([5, 1]), tree.stack([memory(3), memory(3)]))
    assert store.stats() == {tier: {"clients": 0, "bytes": 0} for tier in ("device", "host", "disk")}
    assert list(store.items()) == []


@pytest.mark.parametrize("budget", [None, 0])
def test_empty_memories_are_kept_as_such(budget: int | None) -> None:
    store = ModelStore({}, device_bytes=budget, host_bytes=0)
    store.put(4, {})
    store.scatter([2, 9], {"branch": {}})
    assert list(store.items()) == [(2, {"branch": {}}), (4, {}), (9, {"branch": {}})]
    assert store.gather([2, 9]) == {"branch": {}}
    assert store._disk is None


def test_gather_of_nobody() -> None:
    got = ModelStore(memory(0)).gather([], PER_SAMPLE, 2)
    assert {name: tuple(leaf.shape) for name, leaf in tree.leaves(got)}["logits"] == (0, 2, 3)


def test_rows_survive_without_the_callers_tensors() -> None:
    store, mine = ModelStore({}), {"v": torch.ones(4, requires_grad=True)}
    gone = weakref.ref(mine["v"])
    store.put(1, mine)
    del mine
    gc.collect()
    assert gone() is None
    assert torch.equal(store.get(1)["v"], torch.ones(4))
    assert not store.get(1)["v"].requires_grad


def test_get_is_not_a_copy_and_equal_layouts_are_one() -> None:
    store = ModelStore(memory(0))
    for k in range(3):
        store.put(k, memory(k, 2))
    assert store.get(1)["last"].data_ptr() == store.get(1)["last"].data_ptr()
    assert len({id(row.layout) for row in store._rows.values()}) == 1


def test_a_strided_leaf_is_kept_by_value() -> None:
    leaf = torch.arange(12.0).reshape(3, 4).t()
    store = ModelStore({"v": torch.zeros(4, 3)})
    store.put(0, {"v": leaf})
    store.scatter([1, 2], {"v": leaf.unsqueeze(-1).expand(4, 3, 2).permute(2, 0, 1)})
    assert all(torch.equal(store.get(k)["v"], leaf) for k in range(3))


def test_memories_that_do_not_stack_are_refused() -> None:
    store = ModelStore({"v": torch.zeros(2)})
    store.put(3, {"v": torch.zeros(3)})
    with pytest.raises(ValueError, match="clients 0 and 3"):
        store.gather([0, 3])
    with pytest.raises(ValueError, match="stack of 2"):
        store.scatter([0, 1], {"v": torch.zeros(3, 2)})


def on_disk(folder: Path) -> ModelStore:
    store = ModelStore({"v": torch.zeros(100)}, host_bytes=0, folder=folder)
    for k in range(3):
        store.put(k, {"v": torch.full((100,), float(k))})
    store._settle(at_least=2)
    return store


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1], "447 bytes instead of 448"),
        (lambda data: data + b"0", "449 bytes instead of 448"),
        (lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:], "checksum"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(damage, said: str, tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    file = store._rows[1].file
    file.write_bytes(damage(file.read_bytes()))
    for call in (lambda: store.get(1), lambda: store.gather([0, 1]), lambda: list(store.items()), lambda: store.get(1)):
        with pytest.raises(TrainingError, match=said) as error:
            call()
        assert "client 1" in str(error.value)
        assert str(file) in str(error.value)
    assert torch.equal(store.get(0)["v"], torch.zeros(100))
    store.put(1, {"v": torch.ones(100)})
    assert torch.equal(store.get(1)["v"], torch.ones(100))


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    store._rows[1].file.unlink()
    store.prefetch([1])
    with pytest.raises(TrainingError, match=r"client 1: its memory cannot be read from .*row: No such file"):
        store.get(1)


def test_a_disk_that_cannot_be_written_is_an_error_and_loses_nothing(monkeypatch, tmp_path: Path) -> None:
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store = ModelStore({"v": torch.zeros(100)}, host_bytes=500, folder=tmp_path)
    store.put(0, {"v": torch.ones(100)})
    with pytest.raises(TrainingError, match=r"client 0: .* cannot be written to .*: No space left"):
        store.put(1, {"v": torch.ones(100)})
    assert torch.equal(dict(store.items())[0]["v"], torch.ones(100))


def test_prefetch_reads_ahead_and_waits_for_nothing(monkeypatch, tmp_path: Path) -> None:
    began, go, read = [], threading.Event(), model_store.read_row

    def slowly(client, *args):
        began.append(client)
        assert go.wait(10)
        read(client, *args)

    monkeypatch.setattr(model_store, "read_row", slowly)
    size = 448
    store = ModelStore({"v": torch.zeros(100)}, host_bytes=16 * size, folder=tmp_path)
    for k in range(20):
        store.put(k, {"v": torch.full((100,), float(k))})
    store._settle(at_least=len(store._writing))
    assert all(store._rows[k].host is None for k in (0, 1))
    store.prefetch([0, 1])
    assert [k for k in range(20) if store._rows[k].reading is not None] == [0, 1]
    go.set()
    assert torch.equal(store.gather([0, 1])["v"], torch.tensor([[0.0] * 100, [1.0] * 100]))
    assert sorted(began) == [0, 1]


def test_prefetch_brings_rows_to_the_device(tmp_path: Path) -> None:
    store = ModelStore({"v": torch.zeros(100)}, device_bytes=3 * 448, folder=tmp_path)
    for k in range(6):
        store.put(k, {"v": torch.full((100,), float(k))})
    store.prefetch([1, 0, 99, 2, 5])  # the first three that are kept fit
    assert sorted(store._device.rows) == [0, 1, 2]
    assert torch.equal(store.gather([0, 99, 5])["v"][:, 0], torch.tensor([0.0, 0.0, 5.0]))


def test_a_gather_larger_than_the_host_reads_each_row_once(monkeypatch, tmp_path: Path) -> None:
    began, read = [], model_store.read_row
    monkeypatch.setattr(model_store, "read_row", lambda client, *args: (began.append(client), read(client, *args)))
    store = ModelStore({"v": torch.zeros(100)}, host_bytes=8 * 448, folder=tmp_path)
    for k in range(60):
        store.put(k, {"v": torch.full((100,), float(k))})
    store._settle(at_least=len(store._writing))
    assert torch.equal(store.gather(range(40))["v"][:, 0], torch.arange(40.0))
    assert sorted(began) == list(range(40))


def test_items_read_one_at_a_time_and_move_nothing(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    before, alive = store.stats(), []
    for _, kept in store.items():
        alive.append(weakref.ref(kept["v"].untyped_storage()))
        del kept
        gc.collect()
    assert store.stats() == before
    assert sum(storage() is not None for storage in alive) <= 1


def test_the_folder_goes_with_the_store(tmp_path: Path) -> None:
    store = on_disk(tmp_path / "new")
    (made,) = (tmp_path / "new").iterdir()
    assert {file.suffix for file in made.iterdir()} == {".row"}
    del store
    gc.collect()
    assert not made.exists()
    store = on_disk(tmp_path)
    store.close()
    store.close()
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
    with pytest.raises(RuntimeError, match="closed"):
        store.get(0)


def test_files_of_replaced_rows_go(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    for _ in range(5):
        store.scatter([0, 1, 2], {"v": torch.zeros(3, 100)})
    store._settle(at_least=3)
    store._disk.reader.shutdown(wait=True)
    assert len(list(store._disk.folder.iterdir())) == store.stats()["disk"]["clients"]


def test_stores_that_share_memory_have_a_part_each(tmp_path: Path) -> None:
    whole, third = (
        ModelStore(memory(0), device_bytes=9000, host_bytes=6000, folder=tmp_path, sharing=n) for n in (1, 3)
    )
    assert [(s._device.limit, s._host.limit) for s in (whole, third)] == [(9000, 6000), (3000, 2000)]
    by_itself, beside = (ModelStore(memory(0), sharing=n) for n in (1, 4))
    assert beside._host.limit == pytest.approx(by_itself._host.limit / 4, rel=0.1)


def test_a_checkpoint_keeps_the_bank(tmp_path: Path) -> None:
    store = ModelStore(memory(0), host_bytes=1000)
    for k in (11, 2, 5):
        store.put(k, memory(k, k))
    journal = Journal(tmp_path)
    journal.save(0, {}, store.items())
    found = journal.load(torch.device("cpu"))
    again = ModelStore(memory(0), host_bytes=1000)
    for client, kept in found.clients():
        again.put(client, kept)
    assert all(same(again.get(k), store.get(k)) for k in (2, 5, 11, 0))


def test_slots_of_pinned_memory_are_used_again(monkeypatch) -> None:
    """Without a GPU: the slabs and the lists of free slots."""
    made, empty = [], torch.empty

    def counted(shape, dtype, pin_memory):
        made.append(shape)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(model_store.torch, "empty", counted)
    pinned = model_store.Pinned(1 << 30)
    slots = [pinned.take(45_000_000) for _ in range(20)]
    assert len({slot.buffer.data_ptr() for slot in slots}) == 20
    assert all(slot.buffer.numel() == 45_000_000 for slot in slots)
    assert len(made) == 1
    assert made[0][0] * made[0][1] <= 1 << 30
    assert made[0][1] < 45_000_000 * 17 / 16
    for slot in slots:
        pinned.give(slot)
    taken = {pinned.take(44_990_000).buffer.data_ptr() for _ in range(20)}
    assert len(taken) == 20
    assert len(made) == 1


def test_a_slot_is_free_only_when_nothing_uses_it(monkeypatch, late_gpu) -> None:
    """A row that is asked for while it is being written, and one whose reading is stopped before it began."""
    go, write = threading.Event(), model_store.write_row

    def slowly(*args):
        assert go.wait(10)
        return write(*args)

    monkeypatch.setattr(model_store, "write_row", slowly)
    store = ModelStore({"v": torch.zeros(100)}, device="cuda", device_bytes=448, host_bytes=16 * 448)
    for k in range(16):
        store.put(k, {"v": torch.full((100,), float(k))})
    row = store._rows[0]
    assert row.writing is not None
    store.get(0)  # to the device, and it stays on the host
    assert not row.leaving
    for k in list(store._host.rows):  # everything else was asked for later
        if k != 0:
            store._touch(store._rows[k])
    store._host_room(2 * 448, patient=False)
    assert row.host is not None  # its bytes are still being written
    assert row.leaving
    go.set()
    store._settle(at_least=len(store._writing))
    assert row.host is None

    store._drop_device(row)
    for slots in store._pinned.free.values():
        for slot in slots:
            slot.busy = [_LateEvent(_LateStream(), 1)]
    store._disk.reader.submit = lambda *args: Future()  # a job that never gets to run
    store._begin_read(row)
    slot = row.host
    store._drop_host(row)
    assert slot.busy
    store.close()
