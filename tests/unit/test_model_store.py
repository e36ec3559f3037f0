"""The Model Store, against a dictionary of clones: the same bits, whatever the tiers hold."""

import gc
import random
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import tree
from fedstill.core.errors import TrainingError
from fedstill.edge.model_store.disk import Disk, read_row, write_row
from fedstill.edge.model_store.store import ModelStore
from fedstill.edge.model_store.tiers import PinnedSlots, Row
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


def play(seed: int, steps: int, runs: int = 1, **options) -> None:
    """Random calls; after each, what it returns and what one client has are the oracle's."""
    draw = random.Random(seed)
    oracle, initial, returned = {}, [memory(-run) for run in range(runs)], []
    store = ModelStore(initial[0], clients=CLIENTS if runs > 1 else 0, others=initial[1:], **options)
    everyone = range(runs * CLIENTS)

    def expected(client: int):
        return oracle.get(client, initial[client // CLIENTS])

    try:
        for step in range(1, steps + 1):
            some = draw.sample(everyone, draw.randint(1, CLIENTS))
            calls = ["put", "put", "get", "gather", "scatter", "scatter", "prefetch", "items", "forget"]
            call = draw.choice(calls)
            if call == "put":
                new = memory(step, draw.randint(0, 4))
                store.put(some[0], new)
                oracle[some[0]] = tree.clone(new)
                for _, leaf in tree.leaves(new):
                    leaf.zero_()
            elif call == "get":
                got, right = store.get(some[0]), expected(some[0])
                assert same(got, right)
                returned.append((got, tree.clone(right)))
            elif call == "gather":
                rows = draw.randint(0, 5)
                got = store.gather(some, PER_SAMPLE, rows)
                assert same(got, stacked([expected(k) for k in some], rows))
                for _, leaf in tree.leaves(got):
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
            elif call == "forget":
                store.forget(some[0])
                oracle.pop(some[0], None)
            else:
                items = list(store.items())
                assert [k for k, _ in items] == sorted(oracle)
                assert all(same(m, oracle[k]) for k, m in items)
            check_books(store)
            k = draw.choice(everyone)
            assert same(store.get(k), expected(k))
        assert all(same(got, right) for got, right in returned)  # later calls do not reach what was returned
    finally:
        store.close()


def check_books(store: ModelStore) -> None:
    """What the tiers count is what the rows have."""
    rows, tiers = store._rows.values(), store._hierarchy
    assert tiers.device.used == sum(r.layout.bytes for r in rows if r.device is not None)
    assert tiers.host.used == sum(r.layout.bytes for r in rows if r.host is not None)
    assert tiers.leaving == sum(r.layout.bytes for r in rows if r.leaving)
    assert tiers.device.used <= tiers.device.limit
    assert all(r.device is not None or r.host is not None or r.file is not None for r in rows)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    runs=st.integers(1, 3),
    device=st.sampled_from(BUDGETS),
    host=st.sampled_from(BUDGETS),
)
def test_the_store_equals_a_dictionary(seed: int, runs: int, device: int | None, host: int | None) -> None:
    play(seed, 25, runs, device_bytes=device, host_bytes=host)


@pytest.mark.parametrize("device", BUDGETS)
@pytest.mark.parametrize(("host", "runs"), [(0, 1), (1500, 1), (1500, 3)])
def test_a_long_sequence_equals_a_dictionary(device: int | None, host: int, runs: int, tmp_path: Path) -> None:
    play(7, 250, runs, device_bytes=device, host_bytes=host, folder=tmp_path)
    assert not list(tmp_path.iterdir())


class LateStream:
    """A stream in slow motion: its jobs are done when somebody waits for them, and not before."""

    lock = threading.RLock()

    def __init__(self) -> None:
        self.queue, self.done = [], 0

    def add(self, job) -> "LateEvent":
        with self.lock:
            self.queue.append(job)
            return LateEvent(self, self.done + len(self.queue))

    def run(self, upto: int) -> None:
        with self.lock:
            while self.done < upto:
                self.queue.pop(0)()
                self.done += 1


class LateEvent:
    def __init__(self, stream: LateStream, upto: int) -> None:
        self.stream, self.upto = stream, upto

    def synchronize(self) -> None:
        self.stream.run(self.upto)

    def query(self) -> bool:
        return self.stream.done >= self.upto


class LateGpu:
    """A `Gpu` in ordinary memory whose copies to and from the host come as late as they may."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.up, self.down = LateStream(), LateStream()

    def free_bytes(self) -> int:
        return 400_000

    def allocate_pinned(self, count: int, size: int) -> torch.Tensor:
        return torch.empty((count, size), dtype=torch.uint8)

    def record(self) -> LateEvent:  # the caller's stream is prompt: what it was asked for is done
        return LateEvent(LateStream(), 0)

    def wait(self, event: LateEvent | None, buffer: torch.Tensor | None = None) -> None:
        if event is not None:
            event.synchronize()

    def download(self, source, buffer, after) -> LateEvent:
        for event in after:
            self.down.add(event.synchronize)
        return self.down.add(lambda: buffer.copy_(source))

    def upload(self, buffer, filled, ahead=False):
        target = torch.empty_like(buffer)
        if filled is not None:
            self.up.add(filled.synchronize)
        event = self.up.add(lambda: target.copy_(buffer))
        if not ahead:
            event.synchronize()
        return target, event


@pytest.mark.parametrize("device", [0, 700, 3000, 100_000])
@pytest.mark.parametrize("host", [0, 1500, 4000, 100_000])
def test_late_copies_equal_a_dictionary(device: int, host: int) -> None:
    for seed in range(4):
        play(seed, 80, 1 + seed % 2, gpu=LateGpu(), device_bytes=device, host_bytes=host)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", [0, 3000, None])
def test_a_store_on_a_gpu_returns_trees_there(device: int | None) -> None:
    store = ModelStore(memory(0), device="cuda", device_bytes=device, host_bytes=2000)
    for k in range(CLIENTS):
        store.put(k, memory(k, k))
    store.prefetch(range(CLIENTS))
    got = store.gather(range(CLIENTS), PER_SAMPLE, 4)
    assert all(leaf.is_cuda for _, leaf in tree.leaves(got))
    assert same(tree.to(got, "cpu"), stacked([memory(k, k) for k in range(CLIENTS)], 4))


def test_rows_pass_through_every_tier() -> None:
    size = ModelStore(memory(0)).row_bytes
    store = ModelStore(memory(0), device_bytes=2 * size, host_bytes=3 * size)
    for k in range(10):
        store.put(k, memory(k))
    stats = store.stats()
    assert stats["device"] == {"clients": 2, "bytes": 2 * size}
    assert 1 <= stats["host"]["clients"] <= 3
    assert stats["disk"]["clients"] >= 5
    assert all(same(store.get(k), memory(k)) for k in range(10))
    store.close()


def test_runs_have_initial_memories_of_their_own() -> None:
    store = ModelStore(memory(1), clients=3, others=[memory(2), memory(3)])
    store.put(4, memory(9))
    right = [memory(1), memory(3), memory(9), memory(2), memory(1)]
    assert same(store.gather([2, 6, 4, 5, 0]), tree.stack(right))
    assert all(same(store.get(k), m) for k, m in zip([2, 6, 4, 5, 0], right, strict=True))
    store.forget(4)
    store.forget(7)  # has nothing to forget
    assert same(store.get(4), memory(2))
    assert list(store.items()) == []
    assert store.stats()["host"] == {"clients": 0, "bytes": 0}


def test_runs_that_do_not_fit_one_store_are_refused() -> None:
    with pytest.raises(ValueError, match=r"initial memories of runs 0 and 2 differ"):
        ModelStore({"v": torch.zeros(2)}, clients=3, others=[{"v": torch.ones(2)}, {"v": torch.ones(3)}])
    with pytest.raises(ValueError, match="clients is 0"):
        ModelStore({"v": torch.zeros(2)}, others=[{"v": torch.ones(2)}])
    store = ModelStore({"v": torch.zeros(2)}, clients=3, others=[{"v": torch.ones(2)}])
    for call in (store.get, store.forget, lambda k: store.put(k, {"v": torch.ones(2)}), lambda k: store.gather([k])):
        for client in (6, -1):
            with pytest.raises(ValueError, match=f"client {client}: this store has 2 × 3 clients"):
                call(client)


@pytest.mark.parametrize("budgets", [{}, {"device_bytes": 500, "host_bytes": 0}])
def test_a_forgotten_memory_leaves_nothing_behind(budgets, tmp_path: Path) -> None:
    store = ModelStore({"v": torch.zeros(100)}, folder=tmp_path, **budgets)
    for k in range(4):
        store.put(k, {"v": torch.full((100,), float(k + 1))})
    for k in range(4):
        store.forget(k)
    check_books(store)
    assert store.stats() == {tier: {"clients": 0, "bytes": 0} for tier in ("device", "host", "disk")}
    assert torch.equal(store.gather(range(4))["v"], torch.zeros(4, 100))
    store._hierarchy.disk.wait_for_readers()
    assert not list(tmp_path.rglob("*.row"))


def test_a_client_that_stored_nothing_costs_nothing() -> None:
    store = ModelStore(memory(3))
    assert same(store.get(8), memory(3))
    assert same(store.gather([5, 1]), tree.stack([memory(3), memory(3)]))
    assert store.stats() == {tier: {"clients": 0, "bytes": 0} for tier in ("device", "host", "disk")}
    assert list(store.items()) == []


@pytest.mark.parametrize("budget", [None, 0])
def test_empty_memories_are_stored_as_such(budget: int | None) -> None:
    store = ModelStore({}, device_bytes=budget, host_bytes=0)
    store.put(4, {})
    store.scatter([2, 9], {"branch": {}})
    assert list(store.items()) == [(2, {"branch": {}}), (4, {}), (9, {"branch": {}})]
    assert store.gather([2, 9]) == {"branch": {}}
    assert store._hierarchy.disk.folder is None


def test_gather_of_nobody() -> None:
    got = ModelStore(memory(0)).gather([], PER_SAMPLE, 2)
    assert {name: tuple(leaf.shape) for name, leaf in tree.leaves(got)}["logits"] == (0, 2, 3)


def test_rows_survive_without_the_callers_tensors() -> None:
    store, new = ModelStore({}), {"v": torch.ones(4, requires_grad=True)}
    leaf = weakref.ref(new["v"])
    store.put(1, new)
    del new
    gc.collect()
    assert leaf() is None
    assert torch.equal(store.get(1)["v"], torch.ones(4))
    assert not store.get(1)["v"].requires_grad


def test_get_is_not_a_copy_and_equal_layouts_are_one() -> None:
    store = ModelStore(memory(0))
    for k in range(3):
        store.put(k, memory(k, 2))
    assert store.get(1)["last"].data_ptr() == store.get(1)["last"].data_ptr()
    assert len({id(row.layout) for row in store._rows.values()}) == 1


def test_a_strided_leaf_is_stored_by_value() -> None:
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
    store._hierarchy.settle(at_least=2)
    return store


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "447 bytes instead of 448"),
        (lambda data: data + b"0", "449 bytes instead of 448"),
        (lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:], "checksum"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(damage, message: str, tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    file = store._rows[1].file
    file.write_bytes(damage(file.read_bytes()))
    for call in (lambda: store.get(1), lambda: store.gather([0, 1]), lambda: list(store.items()), lambda: store.get(1)):
        with pytest.raises(TrainingError, match=message) as error:
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


def test_a_disk_that_cannot_be_written_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    class FullDisk(Disk):
        def new_file(self, client: int) -> Path:
            return super().new_file(client).parent / "missing" / "file.row"

    store = ModelStore({"v": torch.zeros(100)}, host_bytes=500, disk=FullDisk(tmp_path))
    store.put(0, {"v": torch.ones(100)})
    with pytest.raises(TrainingError, match=r"client 0: .* cannot be written to .*file.row: No such file"):
        store.put(1, {"v": torch.ones(100)})
    assert torch.equal(dict(store.items())[0]["v"], torch.ones(100))


def test_prefetch_reads_ahead_and_waits_for_nothing(tmp_path: Path) -> None:
    began, go = [], threading.Event()

    def slowly(client, *args):
        began.append(client)
        assert go.wait(10)
        read_row(client, *args)

    size = 448
    store = ModelStore({"v": torch.zeros(100)}, host_bytes=16 * size, disk=Disk(tmp_path, read=slowly))
    for k in range(20):
        store.put(k, {"v": torch.full((100,), float(k))})
    store._hierarchy.settle(at_least=len(store._hierarchy.writing))
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
    store.prefetch([1, 0, 99, 2, 5])  # the first three that are stored fit
    assert sorted(store._hierarchy.device.rows) == [0, 1, 2]
    assert torch.equal(store.gather([0, 99, 5])["v"][:, 0], torch.tensor([0.0, 0.0, 5.0]))


def test_a_gather_larger_than_the_host_reads_each_row_once(tmp_path: Path) -> None:
    began = []
    disk = Disk(tmp_path, read=lambda client, *args: (began.append(client), read_row(client, *args))[1])
    store = ModelStore({"v": torch.zeros(100)}, host_bytes=8 * 448, disk=disk)
    for k in range(60):
        store.put(k, {"v": torch.full((100,), float(k))})
    store._hierarchy.settle(at_least=len(store._hierarchy.writing))
    assert torch.equal(store.gather(range(40))["v"][:, 0], torch.arange(40.0))
    assert sorted(began) == list(range(40))


def test_items_read_one_at_a_time_and_move_nothing(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    before, alive = store.stats(), []
    for _, item in store.items():
        alive.append(weakref.ref(item["v"].untyped_storage()))
        del item
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
    store._hierarchy.settle(at_least=3)
    store._hierarchy.disk.wait_for_readers()
    assert len(list(store._hierarchy.disk.folder.iterdir())) == store.stats()["disk"]["clients"]


def test_a_checkpoint_keeps_the_store(tmp_path: Path) -> None:
    store = ModelStore(memory(0), host_bytes=1000)
    for k in (11, 2, 5):
        store.put(k, memory(k, k))
    journal = Journal(tmp_path)
    journal.save(0, {}, store.items())
    checkpoint = journal.load(torch.device("cpu"))
    restored = ModelStore(memory(0), host_bytes=1000)
    for client, item in checkpoint.clients():
        restored.put(client, item)
    assert all(same(restored.get(k), store.get(k)) for k in (2, 5, 11, 0))


def test_slots_of_pinned_memory_are_used_again() -> None:
    """Without a GPU: the slabs and the lists of free slots."""
    slabs = []

    def allocate(count: int, size: int) -> torch.Tensor:
        slabs.append((count, size))
        return torch.empty((count, size), dtype=torch.uint8)

    pinned = PinnedSlots(1 << 30, allocate)
    slots = [pinned.take(45_000_000) for _ in range(20)]
    assert len({slot.buffer.data_ptr() for slot in slots}) == 20
    assert all(slot.buffer.numel() == 45_000_000 for slot in slots)
    assert len(slabs) == 1
    assert slabs[0][0] * slabs[0][1] <= 1 << 30
    assert slabs[0][1] < 45_000_000 * 17 / 16
    for slot in slots:
        pinned.give_back(slot)
    assert len({pinned.take(44_990_000).buffer.data_ptr() for _ in range(20)}) == 20
    assert len(slabs) == 1


def test_a_slot_is_free_only_when_nothing_uses_it(tmp_path: Path) -> None:
    """A row that is asked for while it is being written, and one whose reading is cancelled before it began."""
    go = threading.Event()

    def slowly(*args) -> int:
        assert go.wait(10)
        return write_row(*args)

    class StalledDisk(Disk):
        def begin_read(self, *args) -> Future:
            return Future()  # a job that never gets to run

    disk = StalledDisk(tmp_path, write=slowly)
    store = ModelStore({"v": torch.zeros(100)}, gpu=LateGpu(), device_bytes=448, host_bytes=16 * 448, disk=disk)
    tiers = store._hierarchy
    for k in range(16):
        store.put(k, {"v": torch.full((100,), float(k))})
    row = store._rows[0]
    assert row.writing is not None
    store.get(0)  # to the device, and it stays on the host
    assert not row.leaving
    for k in list(tiers.host.rows):  # everything else was used later
        if k != 0:
            tiers.touch(store._rows[k])
    tiers.reserve_host(2 * 448, wait=False)
    assert row.host is not None  # its bytes are still being written
    assert row.leaving
    go.set()
    tiers.settle(at_least=len(tiers.writing))
    assert row.host is None

    tiers.drop_device(row)
    for slots in tiers.pinned.free.values():
        for slot in slots:
            slot.readers = [LateEvent(LateStream(), 1)]
    tiers.begin_read(row)
    slot = row.host
    tiers.drop_host(row)
    assert slot.readers
    store.close()


def test_a_slot_is_filled_only_when_the_device_has_read_it() -> None:
    store = ModelStore({"v": torch.zeros(100)}, gpu=LateGpu(), device_bytes=448, host_bytes=4 * 448)
    tiers = store._hierarchy
    for k in range(2):
        store.put(k, {"v": torch.full((100,), float(k + 1))})
    row = store._rows[0]
    store.prefetch([0])  # begins a copy to the device that nobody has waited for
    slot = row.host
    tiers.drop_host(row)
    tiers.pinned.free = {len(slot.storage): deque([slot])}
    other = Row(9, row.layout)
    tiers.download(other, torch.full((448,), 255, dtype=torch.uint8), None)
    assert other.host is slot
    slot.filled.synchronize()
    assert torch.equal(store.get(0)["v"], torch.ones(100))
    store.close()
