"""CSV files as people have them: separators, decimal commas, gaps, texts and labels by name; what is unclear is refused."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import InputError
from fedstill.data import Federation, Preprocessing, load
from fedstill.data.columns import Columns
from fedstill.data.gather import gather
from fedstill.data.tables import GAPS, MOST_TEXTS, read_table

PLAIN = 'name,age,BMI,sick\nann,34.5,21,1\n"o\'hara, bob",50.25,,0\nzoë,-1e2,30.125,1\n'
ROWS = [["ann", 34.5, 21.0, 1.0], ["o'hara, bob", 50.25, np.nan, 0.0], ["zoë", -100.0, 30.125, 1.0]]


def cells(path: Path) -> list[list[Any]]:
    """What a file holds, with texts as texts."""
    table = read_table(path)
    assert table.header == ("name", "age", "BMI", "sick")
    out = [
        [v if kinds is None else kinds[int(v)] for v, kinds in zip(row, table.texts, strict=True)]
        for row in table.values.tolist()
    ]
    return out


def refused(path: Path, **rules: str) -> str:
    """The line by which a file is refused."""
    with pytest.raises(InputError) as caught:
        load(path, preprocessing=Preprocessing(**rules))
    assert str(caught.value).isprintable()
    return str(caught.value).replace(str(path.parent if path.is_file() else path), "…")


SEMICOLON = PLAIN.replace(",", ";").replace("o'hara; bob", "o'hara, bob")


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "\ufeff" + PLAIN.replace("\n", "\r\n"),
        SEMICOLON,
        SEMICOLON.replace(".", ","),
        SEMICOLON.replace(";", "\t"),
        SEMICOLON.replace(";", "\t").replace(".", ","),
        "\n".join(";".join(f'"{cell}"' for cell in row) for row in csv.reader(io.StringIO(PLAIN))) + "\n\n",
        PLAIN.replace(",,", ", NA ,"),
        PLAIN.replace(",,", ",?,"),
        PLAIN.replace(",,", ",#N/A,"),
        PLAIN.replace(",,", ",<NA>,"),
        PLAIN.replace(",,", ",None,"),
        PLAIN.replace("\n", "\r"),
    ],
    ids=[
        "commas",
        "BOM, CRLF",
        "semicolons",
        "decimal commas",
        "tabs",
        "tabs, commas",
        "all quoted",
        "NA",
        "?",
        "#N/A",
        "<NA>",
        "None",
        "CR",
    ],
)
def test_the_same_table_however_it_is_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", newline="")
    found = cells(tmp_path / "a.csv")
    assert str(found) == str(ROWS)  # as texts: NaN equals no NaN


def test_a_decimal_comma_is_beyond_doubt_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a;y\n1,234;0\n12,5;1\n")
    assert load(path).x.ravel().tolist() == [np.float32(1.234), 12.5], "one number says what the comma is"
    path.write_text("a;y\n1,234;0\n2,345;1\n")
    assert (
        "line 2, column 1 (a) = '1,234': should be with a decimal point or without a comma: it may be 1.234 or 1234"
        in refused(path)
    )
    path.write_text("a;b;y\n1,5;2.5;0\n")
    assert "line 2, column 1 (a) = '1,5': should be with a decimal point, as 2.5 in line 2" in refused(path)
    path.write_text("1,5;2,5;0\n3,5;4,5;1\n")  # no header: these are numbers
    assert load(path).x.tolist() == [[1.5, 2.5], [3.5, 4.5]]
    path.write_text("day;y\n12.5.2020;0\n1,5;1\n")  # a date is a text, not a number with a point
    assert "column 1 (day)" in refused(path)


def test_commas_within_texts_divide_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("place;note;y\nUlm, Süd;a,b;0\nUlm, Nord;c,d;1\n")
    assert read_table(path).texts == (("Ulm, Süd", "Ulm, Nord"), ("a,b", "c,d"), None)
    path.write_text('place,y\n"a;b",0\n"c;d",1\n')
    assert read_table(path).texts == (("a;b", "c;d"), None)


def test_labels_and_columns_are_chosen_by_name(tmp_path: Path) -> None:
    for name, first in (("berlin", 0), ("lyon", 3)):
        rows = [f"p{i},{i}.5,{i % 2},{'ill' if i % 2 else 'well'},{i + 10}" for i in range(first, first + 4)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["id,age,stroke,state,size", *rows]))
    ill = load(tmp_path, preprocessing=Preprocessing(label="state", ignore="id, stroke"))
    assert ill.labels == ("ill", "well")
    assert ill.columns is not None
    assert ill.columns.features == ("age", "size")
    assert ill.x.tolist() == [[0.5, 10], [1.5, 11], [2.5, 12], [3.5, 13], [3.5, 13], [4.5, 14], [5.5, 15], [6.5, 16]]
    assert ill.y.tolist() == [1, 0, 1, 0, 0, 1, 0, 1]
    several = load(tmp_path, preprocessing=Preprocessing(label="stroke,size", ignore="id,state"))
    assert several.objective == "regression"
    assert several.labels == ("stroke", "size")
    assert several.y[:2].tolist() == [[0, 10], [1, 11]]
    (tmp_path / "lyon.csv").unlink()
    (tmp_path / "berlin.csv").write_text("age,a,b\n1,0,1\n2,1,1\n")
    both = load(tmp_path, preprocessing=Preprocessing(label="b,a"))
    assert both.objective == "multilabel"
    assert both.y.tolist() == [[1, 0], [1, 1]]
    assert both.labels == ("b", "a")
    one = load(tmp_path / "berlin.csv", preprocessing=Preprocessing(label="a"))
    assert one.owner is None, "a file of its own is dealt by the partition"
    assert one.x.tolist() == [[1, 1], [2, 1]]


def test_labels_are_of_the_rows_that_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("age,a,b\n1,0,1\n2,,1\n3,1,1\n")
    data = load(path, preprocessing=Preprocessing(label="a,b", impute="drop"))
    assert data.objective == "multilabel"
    assert data.y.tolist() == [[0, 1], [1, 1]]
    assert data.unlabelled == 1
    path.write_text("age,a\n1,\n2,?\n")
    says = "label = 'a': should be a column with values in a.csv: none of its 2 samples has a label"
    for impute in ("mean", "drop"):
        assert says in refused(path, label="a", impute=impute)


def test_a_column_that_nobody_has_a_value_of(tmp_path: Path) -> None:
    """One line, also where it is to be of categories; at one of several sites it has those of the others."""
    (tmp_path / "a.csv").write_text("age,stage,y\n" + "1,,0\n2,,1\n" * 5)
    rules = Preprocessing(encode="onehot:stage", impute="mean")
    with pytest.raises(InputError, match="impute = mean of stage: should be another rule: no site has a value in its"):
        Federation.from_dataset(load(tmp_path / "a.csv", preprocessing=rules), partition="iid", clients=2)
    (tmp_path / "b.csv").write_text("age,stage,y\n" + "1,1,0\n2,2,1\n" * 5)
    data = load(tmp_path, preprocessing=rules)
    assert data.columns is not None
    assert data.columns.features == ("age", "stage=1", "stage=2")


GAPPY = "age,sex,bp,diag\n34,f,120,ill\n50,m,,well\n61,f,NA,ill\n40,m,130,\n"
MANY = "a,y\n1,0\n" + "".join(f"t{i},0\n" for i in range(MOST_TEXTS + 3))
REFUSED = {
    "texts": (GAPPY, {}, "line 2, column 2 (sex) = 'f': should be a number; --encode onehot makes a column of each of the 2"),
    "and may be left out": (GAPPY, {}, "in this column (--ignore sex leaves it out)"),
    "gaps": (GAPPY, {"encode": "onehot"}, "line 3, column 3 (bp) = nothing: should be a value (2 values are missing: bp 2); "),
    "and their rule": (GAPPY, {"encode": "onehot"}, "bp 2); --impute mean, median or drop says what to do"),
    "no label": (GAPPY, {"encode": "onehot", "ignore": "bp"}, "line 5, column 4 (diag) = nothing: should be a label (1 value is"),
    "and what to do": (GAPPY, {"encode": "onehot", "ignore": "bp"}, "with --impute drop such samples are left out"),
    "unknown label": (GAPPY, {"label": "dia"}, "label = 'dia': should be a column of a.csv: 'diag'?"),
    "label ignored": (GAPPY, {"ignore": "diag"}, "ignore = 'diag': should be another column than the label"),
    "unknown texts": (GAPPY, {"encode": "onehot:sexx"}, "encode = 'sexx': should be a column of a.csv: 'sex'?"),
    "no header": ("1,2,0\n3,4,1\n", {"label": "y"}, "label = 'y': should be left out: a.csv has no header"),
    "a name twice": ("a,a,y\n1,2,0\n", {}, "with a name of its own for each column ('a' is there twice)"),
    "a slip": ("a,y\n1,0\n2,1\nx,1\n", {"encode": "onehot"}, "line 4, column 1 (a) = 'x': should be a number, as 2 of the"),
    "which may be none": ("a,y\n1,0\n2,1\nx,1\n", {"encode": "onehot"}, "; --encode onehot:a takes all as texts"),
    "mixed labels": ("a,b,y\n1,2,x\n1,2,3\n", {}, "line 3, column 3 (y) = '3': should be the name of a class"),
    "names of several": ("a,y,z\n1,p,0\n2,q,1\n", {"label": "y,z"}, "line 2, column 2 (y) = 'p': should be a number, 0 or 1"),
    "too large": ("a,y\n1e39,0\n", {}, "line 2, column 1 (a) = 1e+39: should be a finite number that fits float32"),
    "too many texts": (MANY, {"encode": "onehot"}, "should be one of at most 1,000 texts in a column; --ignore a leaves"),
    "nothing left": ("a,y\n,0\n,1\n", {"impute": "drop"}, "impute = 'drop': should be another rule: no sample of a.csv is"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "rules", "says"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_rule_is_refused_in_a_line_that_names_the_remedy(
    tmp_path: Path, text: str, rules: dict[str, str], says: str
) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert says in refused(tmp_path / "a.csv", **rules)


def test_sites_must_have_the_same_columns_of_the_same_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("stage,y\nI,0\nII,1\n")
    (tmp_path / "b.csv").write_text("stage,y\n1,0\n2,1\n")
    says = (
        "b.csv, line 2, column 1 (stage) = 1: should be a text as in a.csv, or numbers in both; --encode onehot:stage"
    )
    assert says in refused(tmp_path, encode="onehot")
    data = load(tmp_path, preprocessing=Preprocessing(encode="onehot:stage"))
    assert data.columns == Columns(("stage",), (("1", "2", "I", "II"),))
    assert data.x.ravel().tolist() == [2, 3, 0, 1]
    (tmp_path / "b.csv").write_text("stage,y\n,0\n?,1\n")  # a column that a site has no value of is of either kind
    gaps = load(tmp_path, preprocessing=Preprocessing(encode="onehot", impute="mean"))
    assert np.isnan(gaps.x.ravel()).tolist() == [False, False, True, True]


def test_equal_numbers_are_one_category(tmp_path: Path) -> None:
    """pandas writes 1.0 where a column has a gap, and files say true in three ways; codes with zeros stay texts."""
    (tmp_path / "a.csv").write_text("stage,smoker,zip,y\n1,True,01234,0\n2,False,1234,1\n3,True,01234,1\n")
    (tmp_path / "b.csv").write_text("stage;smoker;zip;y\n1,0;TRUE;01234;0\n2,0;false;1234,0;1\n;true;01234;1\n")
    rules = Preprocessing(encode="onehot:stage,zip", impute="mean")
    data = load(tmp_path, preprocessing=rules)
    assert data.columns is not None
    assert data.columns.categories == (("1", "2", "3"), ("false", "true"), ("01234", "1234"))
    assert str(data.x[:, 0].tolist()) == "[0.0, 1.0, 2.0, 0.0, 1.0, nan]"
    assert data.x[:, 1].tolist() == [1, 0, 1, 1, 0, 1]
    assert data.x[:, 2].tolist() == [0, 1, 0, 0, 1, 0]


def test_what_is_no_table_takes_no_rules_of_tables(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2), np.float32), y=[0, 1, 0, 1])
    assert "encode = 'onehot': should be left out: a.npz is no CSV file" in refused(tmp_path, encode="onehot")
    assert "is no table (CSV files)" in refused(tmp_path / "a.npz", impute="mean")
    for rules, says in (
        ({"impute": "median:federated"}, "'median:site', or 'mean:federated': a median over all sites cannot be had from sums"),
        ({"impute": "mode"}, "one of: none, drop, mean"),
        ({"encode": "onehot:"}, "onehot:COLUMN,COLUMN"),
        ({"normalise": "yes"}, "one of: auto, none, site, federated"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            Preprocessing(**rules)


def test_a_name_with_a_comma_is_quoted_as_in_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"weight, kg",age,"say ""hi""",y\nx,1,z,0\nw,2,z,1\n')
    assert "(--ignore '\"weight, kg\"' leaves it out)" in refused(tmp_path / "a.csv")
    assert "'weight, kg' is there" not in refused(tmp_path / "a.csv", ignore='"weight, kgs",age')
    data = load(tmp_path / "a.csv", preprocessing=Preprocessing(ignore='"weight, kg", "say ""hi"""'))
    assert data.columns is not None
    assert data.columns.names == ("age",)
    (tmp_path / "a.csv").write_text('"weight, kg",age,y\n1,1,0\n2,2,1\n')
    data = load(tmp_path / "a.csv", preprocessing=Preprocessing(label='"weight, kg"', encode='onehot:age,"y"'))
    assert data.label_columns == ("weight, kg",)
    assert data.columns == Columns(("age", "y"), (("1", "2"), ("0", "1")))


def test_a_column_of_many_texts_is_said(tmp_path: Path) -> None:
    rows = [f"ann {i},w{i % 21},{'fm'[i % 2]},{i % 2}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["full name,ward,sex,y", *rows]))
    assert load(tmp_path / "a.csv", preprocessing=Preprocessing(encode="onehot")).notes == (
        "full name has 60 texts in 60 samples, nearly every sample has its own: --ignore 'full name' leaves it out",
        "ward has 21 texts in 60 samples, a feature for each: --ignore ward leaves it out",
    )
    (tmp_path / "b.csv").write_text("crp,stage,y\n" + "<5,1,0\n<5,I,1\n7.2,II,0\n<5,,1\n" * 9)
    found = load(tmp_path / "b.csv", preprocessing=Preprocessing(encode="onehot:stage", impute="mean"))
    assert found.notes == (
        "crp has 2 texts in 36 samples, 1 of them numbers (7.2), a feature for each: --ignore crp leaves it out",
    )
    (tmp_path / "c.csv").write_text("drug,y\nnone,0\nNone,1\naspirin,1\n")
    kept = load(tmp_path / "c.csv", preprocessing=Preprocessing(encode="onehot", impute="mean"))
    assert kept.columns is not None
    assert kept.columns.categories == (("aspirin", "none"),), "an answer, while None is Python's gap"
    fewer = load(tmp_path / "a.csv", preprocessing=Preprocessing(encode="onehot", ignore="full name,ward"))
    assert fewer.notes == ()


CELLS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from([*GAPS, "a", "b;c", "1,5", '"q"', "1_0", "ä b", "12.5.20"]),
)


@settings(max_examples=250, deadline=None)
@given(
    st.integers(2, 4).flatmap(lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=5)),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n"]),
)  # fmt: skip
def test_any_table_is_read_cell_by_cell(tmp_path_factory: Any, rows: list[list[str]], separator: str, end: str) -> None:
    """Against Python's own reader: a number is that number, a text that text, a gap a gap; or the file is refused."""
    path = tmp_path_factory.getbasetemp() / "any.csv"
    header = [f"c{i}" for i in range(len(rows[0]))]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator, lineterminator=end).writerows([header, *rows])
    try:
        found = gather([path], Preprocessing(encode="onehot", impute="mean"))
    except InputError:
        return
    (x,) = found.xs
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    kept = [row for row in rows if row[-1].strip().lower() not in GAPS]
    assert len(x) == len(kept)
    for values, row in zip(x.tolist(), kept, strict=True):
        for value, kinds, cell in zip(values, found.columns.categories, row, strict=False):
            if cell.strip().lower() in GAPS:
                assert np.isnan(value)
            elif kinds is not None:
                kind, text = kinds[int(value)], cell.strip()
                number = text.replace(",", ".") if separator != "," else text
                assert kind == text or float(kind) == float(number)
            else:
                assert value == float(cell.replace(",", ".") if separator != "," else cell)
