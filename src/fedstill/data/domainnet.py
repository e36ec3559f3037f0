"""DomainNet (Peng et al., "Moment Matching for Multi-Source Domain Adaptation", 2019): one classification, six styles.

As http://ai.bu.edu/M3SDA publishes it: an archive DOMAIN.zip for each domain, unpacked to `DOMAIN/CLASS/FILE` (jpg, and
png for quickdraw), and two lists, `DOMAIN_train.txt` and `DOMAIN_test.txt`, with lines such as
`clipart/aircraft_carrier/clipart_001_000018.jpg 0`. The ten classes of FedBN (Li et al. 2021), which FedBSD follows,
are in utils/data_utils.py of the repository med-air/FedBN; its own shorter lists are pickles and are not
read: `domainnet:10` takes all images of those classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..core.errors import InputError
from . import mapped
from .dataset import Dataset, count_classes, dataset
from .files import read_text, wrong
from .images import choose, decode, inside

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
SPLITS = ("train", "test")

Lines = list[tuple[str, str, int]]  # file, class, label


def domainnet_set(
    name: str,
    folder: Path,
    size: int | None,
    ten: bool = False,
    chosen: Sequence[str] = (),
    memory_map: str = mapped.OFF,
) -> Dataset:
    """Read all domains or the chosen ones; the classes come from every list present, so labels do not depend on the choice."""
    domains = choose(name, "domain", DOMAINS, chosen)
    lists: dict[tuple[str, str], Lines] = {}
    classes: dict[int, str] = {}
    for domain in DOMAINS:
        for split in SPLITS:
            path = folder / f"{domain}_{split}.txt"
            if domain in domains or path.exists():
                lists[domain, split] = _read_list(path, domain, classes)
    count_classes(str(folder), [np.array(sorted(classes))])
    labels = TEN if ten else tuple(classes.get(label, "") for label in range(1 + max(classes)))
    number = {label: c for c, label in enumerate(labels)}
    images = [
        (file, number[label] if ten else published, k, split)
        for split in SPLITS  # all training lists first
        for k, style in enumerate(domains)
        for file, label, published in lists[style, split]
        if label in number
    ]
    train = sum(split == "train" for *_, split in images)
    for k, style in enumerate(domains):
        if not any(domain == k for _, _, domain, _ in images[:train]):
            raise wrong(folder / f"{style}_train.txt", "a list with images of these classes")
    x = decode([folder / file for file, *_ in images], size, folder, True, memory_map)
    y = np.array([label for _, label, _, _ in images])
    domain_of = np.array([domain for _, _, domain, _ in images], np.int64)
    has_test = train < len(images)
    return dataset(
        name,
        str(folder),
        x[:train],
        y[:train],
        (x[train:], y[train:]) if has_test else None,
        len(labels),
        domain=domain_of[:train],
        test_domain=domain_of[train:] if has_test else None,
        labels=labels,
        groups=tuple(domains),
    )


def _read_list(path: Path, domain: str, classes: dict[int, str]) -> Lines:
    """Read a list of images; add the classes that it names to `classes`, with which they must agree."""
    if not path.exists():
        raise wrong(path, "there; or name the domains that you have, for example domainnet#clipart,real")
    text = read_text(path, "utf-8")
    lines: Lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        file, _, label = line.strip().rpartition(" ")
        components = Path(file).parts
        if len(components) != 3 or components[0] != domain or not re.fullmatch(r"\d{1,5}", label, re.ASCII):
            raise InputError(where, line.strip(), f"{domain}/CLASS/FILE and a label, with a space between")
        inside(path.parent, file, where)
        known = classes.setdefault(int(label), components[1])
        if known != components[1]:
            raise InputError(where, line.strip(), f"of class {known}, as label {label} is elsewhere")
        lines.append((file, components[1], int(label)))
    if not lines:
        raise wrong(path, "a list of at least one image")
    return lines
