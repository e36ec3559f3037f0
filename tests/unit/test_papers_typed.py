"""Published numbers typed a second time from the papers' texts, not from our files: both typings agree cell by cell.

A line is a row of the paper as its text has it: the row's name, then what stands under each column. `-` stands where the paper
has nothing.
"""

from __future__ import annotations

import pytest

from fedstill import papers

TYPED = {
    ("pfedsd/table4", ""): """
Method | Fashion-MNIST | Fashion-MNIST, speedup | CIFAR-10 | CIFAR-10, speedup | CIFAR-100 | CIFAR-100, speedup
FedPer | 100 | - | 100 | - | 100 | -
pFedSD | 20 | 5 | 57 | 1.8 | 43 | 2.3
""",
    ("pfedsd/table5", ""): """
Method | Fashion-MNIST | Fashion-MNIST, ± | CIFAR-10 | CIFAR-10, ± | CIFAR-100 | CIFAR-100, ±
FedPer | 94.69 | 5.08 | 79.25 | 10.20 | 44.45 | 5.93
LG-FedAvg | 91.31 | 7.20 | 72.56 | 12.26 | 21.78 | 4.95
pFedMe | 92.14 | 6.82 | 75.43 | 11.29 | 26.82 | 5.07
FedFomo | 91.96 | 6.79 | 73.09 | 11.91 | 26.43 | 5.52
pFedSD | 95.92 | 3.88 | 80.17 | 9.23 | 48.62 | 6.00
""",
    ("pfedsd/table9", ""): """
Method | Fashion-MNIST | CIFAR-10 | CIFAR-100
L2 | 96.43 ± 0.03 | 81.56 ± 0.34 | 52.76 ± 0.54
EWC | 96.44 ± 0.05 | 81.64 ± 0.46 | 52.86 ± 0.32
MSE | 96.56 ± 0.12 | 82.41 ± 0.40 | 55.70 ± 0.41
KL | 96.53 ± 0.08 | 82.36 ± 0.70 | 56.61 ± 0.34
""",
    ("pfedsd/table10", ""): """
Method | Time (s) | Comm (%) | Client (%) | Server (%)
FedAvg | 5.69 | 12.70 | 83.00 | 4.30
FedProx | 6.26 | 11.91 | 84.69 | 3.39
FedPer | 5.42 | 11.66 | 85.41 | 2.93
LG-FedAvg | 5.34 | 13.14 | 85.75 | 1.11
pFedMe | 9.31 | 8.11 | 90.20 | 1.69
FedFomo | 38.78 | 4.14 | 95.58 | 0.28
pFedSD | 7.23 | 8.27 | 90.63 | 1.10
""",
    ("pfedsd/table11", ""): """
Method | Communication Cost (MB) | Computational Cost (FLOPs)
FedAvg | 2.15 | 906.15
FedProx | 2.15 | 906.25
FedPer | 2.12 | 906.15
LG-FedAvg | 0.03 | 906.15
pFedMe | 2.15 | 906.35
FedFomo | 7.53 | 951.47
pFedSD | 2.15 | 906.15
pFedSD, past model run again | - | 966.56
""",
    ("pfedkd-wcl/fig1", "accuracy"): """
α | round 200 | round 800
α = 0.1 | > 98 | -
α = 0.3 | > 98 | -
α = 0.9 | - | ≈ 94
""",
    ("pfedkd-wcl/fig1", "loss"): """
α | round 200 | round 800
α = 0.1 | < 0.1 | -
α = 0.3 | < 0.1 | -
α = 0.9 | - | ≈ 0.28
""",
    ("pfedkd-wcl/fig2", "accuracy"): """
α | round 100 | round 800
α = 0.1 | - | ≈ 98
α = 0.3 | - | ≈ 98
α = 0.9 | < 90 | ≈ 92
""",
    ("pfedkd-wcl/fig2", "loss"): """
α | round 800
α = 0.1 | < 0.2
α = 0.3 | < 0.2
α = 0.9 | > 0.5
""",
    ("pfedkd-wcl/section3.4", ""): """
Data, model | over FedAvg | over FedProx | over Per-FedAvg | over pFedMe
MNIST, MLR | 9.2 | 9.1 | 1.8 | 2.1
MNIST, MLP | 6.8 | 6.6 | 1.6 | 1.9
Synthetic, MLR | 32.0 | 30.0 | 7.6 | 6.7
Synthetic, MLP | 23.4 | 21.7 | 12.6 | 11.6
""",
    ("cd2-pfed/table5", ""): """
LI, TA, CD | Local | New
none | 90.31 ± 0.67 | 59.12 ± 0.32
LI | 90.36 ± 0.65 | 59.14 ± 0.30
TA | 90.45 ± 0.21 | 59.45 ± 0.54
CD | 90.58 ± 0.44 | 60.57 ± 0.32
TA + CD | 91.67 ± 0.54 | 61.20 ± 2.03
LI + CD | 91.00 ± 1.03 | 59.84 ± 1.53
LI + TA | 90.81 ± 0.38 | 59.34 ± 0.56
LI + TA + CD | 91.82 ± 0.43 | 61.31 ± 1.53
""",
    ("spectral/table4", ""): """
Methods | 3 epochs, 40 % | 3 epochs, 80 % | 5 epochs, 40 % | 5 epochs, 80 %
Ours (w/ WF) | 1.82 | 1.56 | 2.21 | 1.85
Ditto w/ WF | 1.97 | 1.38 | 2.87 | 1.93
FedRoD w/ WF | 1.75 | 1.54 | 2.42 | 2.19
""",
    ("spectral/table5", ""): """
Method | α = 1, GM | α = 1, PM | α = 0.1, GM | α = 0.1, PM
Ours | 86.37 ± 0.15 | 92.25 ± 0.21 | 75.52 ± 0.11 | 82.69 ± 0.16
Ours w/o SCD-GM | 85.35 ± 0.11 | 91.86 ± 0.17 | 73.51 ± 0.17 | 81.03 ± 0.20
Ours w/o SCD-PM | 82.74 ± 0.39 | 79.65 ± 0.83 | 68.96 ± 0.47 | 70.51 ± 1.21
Ours w/o Both | 85.35 ± 0.11 | 79.65 ± 0.83 | 73.51 ± 0.17 | 70.51 ± 1.21
""",
    ("spectral/table6", ""): """
Method | α = 1, GM | α = 1, PM | α = 0.1, GM | α = 0.1, PM
τ = 0 | 85.35 ± 0.11 | 91.86 ± 0.17 | 73.51 ± 0.17 | 81.03 ± 0.20
τ = 0.1 | 85.18 ± 0.26 | 90.85 ± 0.39 | 72.66 ± 0.11 | 80.51 ± 0.25
τ = 0.3 | 85.42 ± 0.22 | 90.93 ± 0.38 | 72.59 ± 0.38 | 82.60 ± 0.19
τ = 0.4 | 86.37 ± 0.15 | 92.25 ± 0.21 | 75.52 ± 0.11 | 82.69 ± 0.16
τ = 0.5 | 86.33 ± 0.08 | 92.04 ± 0.29 | 74.91 ± 0.31 | 82.50 ± 0.36
τ = 0.7 | 86.08 ± 0.43 | 91.79 ± 0.44 | 72.85 ± 0.28 | 81.44 ± 0.43
τ = 0.9 | 86.25 ± 0.39 | 92.07 ± 0.28 | 72.57 ± 0.31 | 82.09 ± 0.37
τ = 1.0 | 85.47 ± 0.26 | 90.33 ± 0.41 | 73.55 ± 0.17 | 81.36 ± 0.22
""",
    ("spectral/table7", ""): """
Setup | 0.01 | 0.05 | 0.1 | 0.3
GM | 84.76 | 86.37 | 86.20 | 83.55
PM | 90.33 | 92.25 | 91.35 | 89.64
""",
    ("spectral/table8", ""): """
Setup | 0.01 | 0.05 | 0.1 | 0.3
GM | 86.37 | 86.33 | 85.61 | 85.72
PM | 92.25 | 91.89 | 89.47 | 89.33
""",
    ("spectral/table9", ""): """
Methods | 3 epochs, 40 % | 3 epochs, 80 % | 5 epochs, 40 % | 5 epochs, 80 %
Vanilla Ditto | 1 | 1 | 1 | 1
Ditto w/ Our WF | 1.97 | 1.38 | 2.87 | 1.93
Ditto w/ FedAsync | 1.36 | 1.15 | 1.29 | 1.22
Ditto w/ FedBuff | 1.40 | 1.26 | 1.23 | 1.40
""",
}


def of(text: str) -> tuple[float | None, float | None, str]:
    """What one place says: number, ±, relation."""
    if text == "-":
        return None, None, "="
    if text[0] in "<>≈":
        return float(text[1:]), None, text[0]
    number, _, spread = text.partition("±")
    return float(number), float(spread) if spread else None, "="


@pytest.mark.parametrize(("name", "panel"), TYPED)
def test_both_typings_agree(name: str, panel: str) -> None:
    header, *lines = ([part.strip() for part in line.split("|")] for line in TYPED[name, panel].strip().splitlines())
    ours = {(cell.row, cell.column): cell for cell in papers.exhibit(name).cells if cell.panel == panel}
    seen = set()
    for label, *typed in lines:
        for column, text in zip(header[1:], typed, strict=True):
            number = of(text)
            cell = ours.get((label, column))
            assert cell is not None or number[0] is None, (label, column)
            if cell is not None:
                assert (cell.published, cell.spread, cell.relation) == number, cell.id
                seen.add((label, column))
    printed = {place for place, cell in ours.items() if cell.published is not None}
    assert printed == {place for place in seen if ours[place].published is not None}


def test_so_many_were_typed_twice() -> None:
    places = [
        text for table in TYPED.values() for line in table.strip().splitlines()[1:] for text in line.split("|")[1:]
    ]
    assert sum(text.strip() != "-" for text in places) == 231
