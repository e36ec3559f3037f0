"""DomainNet (Peng et al., "Moment Matching for Multi-Source Domain Adaptation", 2019): one classification, six styles.

As http://ai.bu.edu/M3SDA publishes it: an archive DOMAIN.zip for each domain, unpacked to `DOMAIN/CLASS/FILE` (jpg, and
png for quickdraw), and two lists, `DOMAIN_train.txt` and `DOMAIN_test.txt`, with lines such as
`clipart/aircraft_carrier/clipart_001_000018.jpg 0`. The ten classes of FedBN (Li et al. 2021), which FedBSD follows,
stand in utils/data_utils.py of the repository med-air/FedBN; its own shorter lists are pickles and not
read here: `domainnet:10` takes all images of those classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..core.errors import InputError
from .dataset import Dataset, dataset
from .files import content, wrong
from .images import choose, decode, inside

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
PARTS = ("train", "test")

Lines = list[tuple[str, str, int]]  # file, class, label


def domainnet_set(name: str, folder: Path, size: int | None, ten: bool = False, chosen: Sequence[str] = ()) -> Dataset:
    """All domains or the chosen ones; every list there is names the classes, so that labels never depend on the choice."""
    picked = choose(name, "domain", DOMAINS, chosen)
    lists: dict[tuple[str, str], Lines] = {}
    classes: dict[int, str] = {}
    for domain in DOMAINS:
        for part in PARTS:
            path = folder / f"{domain}_{part}.txt"
            if domain in picked or path.exists():
                lists[domain, part] = _lines(path, domain, classes)
    labels = TEN if ten else tuple(classes.get(label, "") for label in range(1 + max(classes)))
    number = {label: c for c, label in enumerate(labels)}
    listed = [
        (file, number[label] if ten else given, k, part)
        for part in PARTS  # all training lists first
        for k, style in enumerate(picked)
        for file, label, given in lists[style, part]
        if label in number
    ]
    cut = sum(part == "train" for *_, part in listed)
    for k, style in enumerate(picked):
        if not any(domain == k for _, _, domain, _ in listed[:cut]):
            raise wrong(folder / f"{style}_train.txt", "a list with images of these classes")
    x = decode([folder / file for file, *_ in listed], size, colour=True)
    y = np.array([label for _, label, _, _ in listed])
    of = np.array([domain for _, _, domain, _ in listed], np.int64)
    tested = cut < len(listed)
    return dataset(
        name,
        str(folder),
        x[:cut],
        y[:cut],
        (x[cut:], y[cut:]) if tested else None,
        len(labels),
        domain=of[:cut],
        test_domain=of[cut:] if tested else None,
        labels=labels,
        groups=tuple(picked),
    )


def _lines(path: Path, domain: str, classes: dict[int, str]) -> Lines:
    """A list's images; the classes that it names are added to those known, and must agree with them."""
    if not path.exists():
        raise wrong(path, "there; or name the domains that you have, for example domainnet#clipart,real")
    try:
        text = content(path).decode()
    except UnicodeDecodeError as error:
        raise wrong(path, f"a list in UTF-8 ({error})") from None
    lines: Lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        file, _, label = line.strip().rpartition(" ")
        parts = Path(file).parts
        if len(parts) != 3 or parts[0] != domain or not (label.isascii() and label.isdigit()):
            raise InputError(where, line.strip(), f"{domain}/CLASS/FILE and a label, with a space between")
        inside(path.parent, file, where)
        known = classes.setdefault(int(label), parts[1])
        if known != parts[1]:
            raise InputError(where, line.strip(), f"of class {known}, as label {label} is elsewhere")
        lines.append((file, parts[1], int(label)))
    if not lines:
        raise wrong(path, "a list of at least one image")
    return lines
