"""Flags made of fields: types, limits, nearest names; and that no method's field clashes with another flag."""

import re
from dataclasses import dataclass, replace
from typing import Literal, get_origin

import pytest

from fedstill.cli import flags
from fedstill.cli.job import plan
from fedstill.cli.train import COMPARE, DEMO, RUN
from fedstill.core import settings
from fedstill.core.errors import InputError
from fedstill.core.settings import setting
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment


@dataclass(frozen=True)
class Sample:
    count: int = setting(3, "how many", least=1, group="a group")
    share: float = setting(0.5, "which share (in %)", above=0, most=1, group="a group")
    fast: bool = setting(False, "whether fast", group="other")
    names: tuple[str, ...] = setting(("x", "y"), "some names", group="other")
    sizes: tuple[int, ...] = setting((), "some sizes", group="other")
    mode: Literal["one", "two"] = setting("one", "which way", group="other")
    some_text: str = setting("", "any text", group="other")

    def __post_init__(self) -> None:
        settings.check(self)


def parser() -> flags.Parser:
    made = flags.Parser("sample", "A sample of every kind of field.", "WORD")
    flags.add(made, Sample)
    return made


def build(*argv: str) -> tuple[Sample, list[str]]:
    given, words = parser().read(argv)
    with flags.named(given):
        return Sample(**flags.take(Sample, given)), words


def test_every_kind_of_field_is_read() -> None:
    line = "a --count 5 b --share=0.25 --fast --names p q --sizes 1 2 --mode two --some-text -1"
    read, words = build(*line.split())
    assert read == Sample(5, 0.25, True, ("p", "q"), (1, 2), "two", "-1")
    assert words == ["a", "b"]


def test_nothing_given_leaves_the_defaults_and_an_empty_list_empties() -> None:
    assert build() == (Sample(), [])
    assert build("--names", "--no-fast")[0] == replace(Sample(), names=())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--count", "many"], "--count = 'many': should be a whole number at least 1"),
        (["--count", "1.5"], "--count = '1.5': should be a whole number at least 1"),
        (["--count", "0"], "--count = 0: should be a whole number at least 1"),
        (["--count", "-3"], "--count = -3: should be a whole number at least 1"),
        (["--count"], "--count = nothing: should be a whole number at least 1"),
        (["--share", "nan"], "--share = nan: should be a number above 0 and at most 1"),
        (["--share", "inf"], "--share = inf: should be a number above 0 and at most 1"),
        (["--share", ""], "--share = '': should be a number above 0 and at most 1"),
        (["--sizes", "1", "x"], "--sizes = 'x': should be a whole number"),
        (["--mode", "tow"], "--mode = 'tow': should be 'two'? (one of: one, two)"),
        (["--fast=yes"], "flag = --fast with 'yes': should be --fast/--no-fast without a value"),
        (["--cuont", "3"], "flag = --cuont: should be --count? ('fedstill sample --help' lists all flags)"),
        (["--some_texts=3"], "flag = --some_texts: should be --some-text? ('fedstill sample --help' lists all flags)"),
        (["-count", "3"], "flag = -count: should be --count? ('fedstill sample --help' lists all flags)"),
        (["--coun", "3"], "flag = --coun: should be --count? ('fedstill sample --help' lists all flags)"),
        (["--qqqq"], "flag = --qqqq: should be left out ('fedstill sample --help' lists all flags)"),
    ],
)
def test_a_bad_flag_is_named_with_what_is_right(argv: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build(*argv)
    assert str(caught.value) == message


def test_a_name_from_elsewhere_is_understood() -> None:
    with pytest.raises(InputError, match=r"--learning-rate: should be --lr\?"):
        RUN.parser(tuple(METHODS)).read(["--learning-rate", "0.1"])


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("fedavg --half-tau 0.9", "left out"),  # no such thing; --tau is another
        ("fedavg --lamb 1", "left out"),  # of other methods
        ("pfedsd --lamb 1", "--lam?"),
        ("--lamb 1", "--lam?"),  # no method is named yet
        ("pfedsd --tua 1", "--tau?"),
        ("fedavg --n-clients 3", "--clients?"),
        ("fedavg --num_rounds 3", "--rounds?"),
        ("fedavg --local-epoch 3", "--epochs?"),
        ("fedavg --batchsize 3", "--batch-size?"),
        ("fedavg --momentun 3", "--momentum?"),
        ("fedavg --weight-decays 3", "--weight-decay?"),
        ("fedavg --no-averagd", "--no-averaged?"),
    ],
)
def test_a_wrong_flag_is_suggested_what_is_meant(line: str, right: str) -> None:
    with pytest.raises(InputError) as caught:
        RUN.parser(tuple(METHODS)).read(line.split())
    assert caught.value.right == f"{right} ('fedstill run --help-all' lists all flags)"


def test_help_has_every_field_with_limits_and_default() -> None:
    text = " ".join(parser().format_help().split())
    for part in (
        "usage: fedstill sample WORD [flags]",
        "a group:",
        "--count N how many [at least 1; default 3]",
        "which share (in %) [above 0 and at most 1; default 0.5]",
        "--fast, --no-fast whether fast [default off]",
        "some names [default x y]",
        "--mode {one,two} which way [default one]",
    ):
        assert part in text


@pytest.mark.parametrize("usage", [RUN, COMPARE, DEMO], ids=lambda usage: usage.command)
def test_help_of_the_commands_names_every_field(usage) -> None:
    text = usage.parser(usage.methods).format_help()
    classes = [Experiment, *(METHODS[name] for name in usage.methods)]
    for field in (field for cls in classes for field in settings.fields_of(cls)):
        assert flags.flag(field.name) in text
    assert "examples:" in text


def test_brief_help_has_the_flags_that_matter_and_a_methods_own() -> None:
    for usage in (RUN, COMPARE):
        text = usage.brief(())
        assert len(text.splitlines()) < 70
        for name in ("data", "partition", "clients", "model", "rounds", "participation", "epochs", "lr", "seed", "out"):
            assert f"  {flags.flag(name)} " in text
        assert "--lam" not in text
        assert "--staleness" not in text
        assert re.search(rf"'fedstill {usage.command} --help-all' lists 1\d\d more flags", text)
    own = RUN.brief(("pfedsd",))
    for field in settings.fields_of(METHODS["pfedsd"]):
        assert flags.flag(field.name) in own
    assert "'fedstill run pfedsd --help-all' lists" in own
    assert "  --mu X" not in own


def test_a_shared_flag_says_which_method_has_which_default() -> None:
    text = " ".join(RUN.parser(("fedavg", "pfedsd")).format_help().split())
    assert "[default fedavg: weighted; pfedsd: uniform]" in text


@pytest.mark.parametrize("name", METHODS)
def test_no_method_clashes_with_the_experiment_or_the_command(name: str) -> None:
    taken = {f.name for f in settings.fields_of(Experiment)} | {"method", "out", "seeds", "help"}
    own = {"pfedkd-wcl": {"server", "server_lr"}, "scaffold": {"server_lr"}}  # the flag is the method's there
    assert taken & {f.name for f in settings.fields_of(METHODS[name])} == own.get(name, set())


def test_a_flag_that_both_have_is_the_methods_own_where_it_has_it() -> None:
    given = {"server": "average", "server_lr": "0.5"}
    wcl = plan([METHODS["pfedkd-wcl"]()], Experiment(), given, "run").experiments["pfedkd-wcl"]
    assert (wcl.server, wcl.server_lr) == ("mean", 0.0)
    assert (wcl.method.server, wcl.method.server_lr) == ("average", 0.5)
    given = {"server": "yogi", "server_lr": "0.5"}
    both = plan([METHODS["fedavg"](), METHODS["scaffold"]()], Experiment(), given, "compare").experiments
    assert (both["fedavg"].server, both["fedavg"].server_lr) == ("yogi", 0.5)
    assert (both["scaffold"].server_lr, both["scaffold"].method.server_lr) == (0.0, 0.5)
    text = " ".join(RUN.parser(("pfedkd-wcl",)).format_help().split())
    assert "--server {distill,average}" in text
    text = " ".join(RUN.parser(("fedavg", "pfedkd-wcl")).format_help().split())
    assert "[default mean]; pfedkd-wcl's own: how the global model learns [one of: distill, average" in text


def test_methods_that_share_a_flag_read_it_alike() -> None:
    shapes: dict[str, set[object]] = {}
    for cls in METHODS.values():
        for field in settings.fields_of(cls):
            annotation = settings.types_of(cls)[field.name]
            shape = "many" if get_origin(annotation) is tuple else "switch" if annotation is bool else "one"
            shapes.setdefault(field.name, set()).add(shape)
    assert all(len(found) == 1 for found in shapes.values())
