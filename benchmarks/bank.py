"""The model store on a GPU: random sequences against a dictionary, then timings.

python benchmarks/bank.py [CLIENTS]
"""

import argparse
import random
import time

import torch

from fedstill.core import tree
from fedstill.edge.model_store.store import ModelStore

PER = frozenset({"logits"})


def memory(seed, rows, wide):
    g = torch.Generator(device="cuda").manual_seed(seed)
    kw = {"generator": g, "device": "cuda"}
    return {
        "v": {"w": torch.randn(wide, **kw), "n": torch.randint(99, (), **kw)},
        "fisher": {},
        "logits": torch.randn(rows, 3, **kw),
        "d": torch.randn(7, dtype=torch.float64, **kw),
        "none": torch.zeros(0, 4, device="cuda"),
        "mask": torch.randint(2, (5,), **kw).bool(),
    }


def same(a, b):
    a, b = list(tree.leaves(a)), list(tree.leaves(b))
    return [n for n, _ in a] == [n for n, _ in b] and all(
        x.is_cuda and x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
        for (_, x), (_, y) in zip(a, b, strict=True)
    )


def play(seed, steps, wide, device_rows, host_rows):
    """Large rows and a busy compute stream, so that copies are really late."""
    draw, clients = random.Random(seed), 10
    initial = memory(0, 0, wide)
    size = ModelStore(initial).row_bytes
    store = ModelStore(initial, device_bytes=int(device_rows * size), host_bytes=int(host_rows * size))
    oracle, a = {}, torch.randn(2048, 2048, device="cuda")
    for step in range(1, steps + 1):
        some = draw.sample(range(clients), draw.randint(1, clients))
        for _ in range(draw.choice([0, 0, 20])):
            a = (a @ a).clamp(-1, 1)
        call = draw.choice(
            ["put", "put", "get", "gather", "gather", "scatter", "scatter", "prefetch", "prefetch", "items"]
        )
        if call == "put":
            new = memory(step, draw.randint(0, 4), wide)
            store.put(some[0], new)
            oracle[some[0]] = tree.clone(new)
            tree.map(lambda t: t.zero_(), new)
        elif call == "get":
            assert same(store.get(some[0]), oracle.get(some[0], initial)), (seed, step, call)
        elif call == "gather":
            rows = draw.randint(0, 5)
            right = tree.stack([tree.fit_rows(oracle.get(k, initial), PER, rows) for k in some])
            got = store.gather(some, PER, rows)
            assert same(got, right), (seed, step, call)
            tree.map(lambda t: t.zero_(), got)
        elif call == "scatter":
            sizes, rows = [draw.randint(0, 5) for _ in some], draw.randint(0, 4)
            new = tree.stack([memory(100 * step + i, rows, wide) for i in range(len(some))])
            store.scatter(some, new, PER, sizes)
            for i, k in enumerate(some):
                oracle[k] = tree.fit_rows(tree.unstack(new, i), PER, sizes[i])
            tree.map(lambda t: t.zero_(), new)
        elif call == "prefetch":
            store.prefetch(some)
        else:
            kept = dict(store.items())
            assert list(kept) == sorted(oracle)
            assert all(same(tree.to(m, "cuda"), oracle[k]) for k, m in kept.items()), (seed, step, call)
    store.close()


def correctness():
    began, runs = time.perf_counter(), 0
    for wide in (1000, 400_000):
        for device_rows in (0, 2.5, 6):
            for host_rows in (0, 3.5, 30):
                play(runs, 40, wide, device_rows, host_rows)
                runs += 1
    print(f"{runs} random sequences equal the dictionary ({time.perf_counter() - began:.1f} s)", flush=True)


def timed(f):
    """Seconds until f has returned, and until the GPU has done all of it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    f()
    returned = time.perf_counter() - began
    torch.cuda.synchronize()
    return returned, time.perf_counter() - began


def resnet_like(n):
    """62 weights, 40 statistics, 20 counts: 45 MB a client."""
    wide = [1728, *[36_864] * 4, 73_728, *[147_456] * 3, 294_912, *[589_824] * 3, 1_179_648, *[2_359_296] * 3, 5130]
    tail = {f"b{i}": torch.randn(n, 256, device="cuda") for i in range(82)}
    counts = {f"n{i}": torch.zeros(n, dtype=torch.int64, device="cuda") for i in range(20)}
    return {"v": {**{f"w{i}": torch.randn(n, w, device="cuda") for i, w in enumerate(wide)}, **tail, **counts}}


def timings(n=100):
    cohort = resnet_like(n)
    one = tree.unstack(cohort, 0)
    size = ModelStore(one).row_bytes
    gigabytes = n * size / 1e9
    print(f"{n} clients of {size / 1e6:.1f} MB: {gigabytes:.2f} GB")
    print(f"{'':58}{'returned':>10}{'done':>10}{'GB/s':>8}")

    def show(name, seconds):
        returned, done = seconds
        print(f"{name:58}{returned * 1e3:8.1f}ms{done * 1e3:8.1f}ms{gigabytes / done:8.1f}", flush=True)
        return done

    ids = list(range(n))
    near = ModelStore(one, device_bytes=3 * n * size, host_bytes=0)
    near.scatter(ids, cohort)
    show("device tier: scatter", timed(lambda: near.scatter(ids, cohort)))
    show("device tier: gather", timed(lambda: near.gather(ids)))
    show("  the same by tree.stack of 100 trees", timed(lambda: tree.stack([near.get(k) for k in ids])))
    show("  and tree.unstack to 100 trees", timed(lambda: [tree.unstack(cohort, k) for k in ids]))
    near.close()

    far = ModelStore(one, device_bytes=0, host_bytes=3 * n * size)
    show("host tier: scatter, first (pins memory)", timed(lambda: far.scatter(ids, cohort)))
    show("host tier: scatter, again", timed(lambda: far.scatter(ids, cohort)))
    show("host tier: gather", timed(lambda: far.gather(ids)))
    far._hierarchy.device.limit = int(1.5 * n * size)  # room for a cohort to be brought ahead
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work():
        b = a
        for _ in range(120):
            b = torch.mm(a, b)
        return b

    work()
    alone = show("matmul loop alone", timed(work))
    copy = show("gather alone", timed(lambda: far.gather(ids)))
    behind = show("matmul loop, then gather", timed(lambda: (work(), far.gather(ids))))
    far.prefetch(ids)  # once, so that the side stream's memory is allocated
    far.scatter(ids, cohort)
    for k in ids:  # back to the host
        row = far._rows[k]
        if row.device is not None:
            far._hierarchy.download(row, row.device, row.uploaded)
            far._hierarchy.drop_device(row)
    assert far.stats()["host"]["clients"] == n
    ahead = show("prefetch, matmul loop, then gather", timed(lambda: (far.prefetch(ids), work(), far.gather(ids))))
    print(f"hidden by prefetch: {(behind - ahead) * 1e3:.0f} of {copy * 1e3:.0f} ms (loop {alone * 1e3:.0f} ms)")
    got = far.gather(ids)
    print(
        "bits:",
        "equal" if same(got, cohort) else "DIFFERENT",
        "| peak device memory",
        f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB |",
        far.stats(),
    )
    far._hierarchy.device.limit = 0
    out = show("scatter, then matmul loop (copies down overlap)", timed(lambda: (far.scatter(ids, cohort), work())))
    print(f"scatter + loop {out * 1e3:.0f} ms against {alone * 1e3:.0f} ms for the loop alone")


def disk(n=30):
    cohort = resnet_like(n)
    size = ModelStore(tree.unstack(cohort, 0)).row_bytes
    store = ModelStore(tree.unstack(cohort, 0), device_bytes=0, host_bytes=int(12 * size))
    _returned, done = timed(
        lambda: (store.scatter(range(n), cohort), store._hierarchy.settle(len(store._hierarchy.writing)))
    )
    print(f"disk tier: scatter of {n}: {n * size / done / 1e9:.2f} GB/s", end="; ")
    _returned, done = timed(lambda: store.gather(range(n)))
    print(
        f"gather: {n * size / done / 1e9:.2f} GB/s;", "equal" if same(store.gather(range(n)), cohort) else "DIFFERENT"
    )
    store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="?", type=int, default=100, help="clients of a cohort (default: 100)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/bank.py: needs a GPU, and torch sees none")
    print(torch.__version__, torch.cuda.get_device_name())
    correctness()
    timings(options.clients)
    disk()
