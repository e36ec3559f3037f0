"""Flags from settings: a field `batch_size` is the flag `--batch-size`, with the field's own help, limits and default.

argparse reads every value as a text; `take` converts it to the field's type, so that an error names the flag, the value and
what would be right.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

from ..core import settings
from ..core.errors import InputError, Shown, nearest
from ..core.method import Method

ORDER = (  # of the groups in the help
    "data", "model", "federation", "local training", "server", "robustness", "privacy", "time", "machine",
)  # fmt: skip
SYNONYMS = {  # names of the same in other libraries
    "alpha": "partition",
    "bs": "batch-size",
    "communication-rounds": "rounds",
    "dataset": "data",
    "fraction": "participation",
    "global-rounds": "rounds",
    "join-ratio": "participation",
    "gpu": "device",
    "learning-rate": "lr",
    "local-epochs": "epochs",
    "output": "out",
    "temperature": "tau",
}


def flag(name: str) -> str:
    """Return a field's flag.

    >>> flag("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def in_words(reason: str) -> str:
    """Return a reason of `Group.unused` with the fields in it as flags.

    >>> in_words("without `over_select`")
    'without --over-select'
    """
    return re.sub(r"`(\w+)`", lambda match: flag(match[1]), reason)


class Parser(argparse.ArgumentParser):
    """One command's flags. Other arguments are returned as a list of words, wherever they stand."""

    def __init__(
        self, command: str, about: str, words: str = "", examples: Sequence[str] = (), all_by: str = "--help"
    ) -> None:
        """`all_by` is the flag that lists all flags, where `--help` shows some."""
        width = min(shutil.get_terminal_size().columns, 120)
        super().__init__(
            prog=f"fedstill {command}",
            usage=" ".join(text for text in (f"fedstill {command}", words, "[flags]") if text),
            description=textwrap.fill(about, width - 2),
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=width),
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,
        )
        self.command = command
        self.takes: dict[str, str] = {"help": "left without a value"}  # by field: which values its flag takes, in words
        self._optionals.title = "help"
        self.owners: dict[str, set[str]] = {}  # by field: the methods that have it, where it is theirs alone
        self.all_by = all_by
        self.add_argument("-h", "--help", action="store_true", help="show this and stop")
        if all_by != "--help":
            self.takes["help_all"] = self.takes["help"]
            self.add_argument(all_by, action="store_true", dest="help_all", help="show all flags and stop")

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the flags' texts by field, and the words; refuse an unknown flag and suggest the nearest one."""
        try:
            flag_values, words = self.parse_known_args(list(argv))
        except argparse.ArgumentError as error:
            action = next(a for a in self._actions if "/".join(a.option_strings) == error.argument_name)
            if "ignored" in error.message:
                text = f"{action.option_strings[0]} with {error.message.removeprefix('ignored explicit argument ')}"
                raise InputError("flag", Shown(text), f"{error.argument_name} without a value") from None
            raise InputError(action.option_strings[0], Shown("nothing"), self.takes[action.dest]) from None
        for word in words:
            if word.startswith("-"):
                raise self._unknown(word.partition("=")[0], words)
        return vars(flag_values), words

    def _unknown(self, word: str, words: Sequence[str]) -> InputError:
        """Return the error for an unknown flag; a flag that belongs to other methods than those named is not suggested."""
        named = set(words) & set().union(*self.owners.values())
        known = [
            option
            for action in self._actions
            if not named or action.dest not in self.owners or self.owners[action.dest] & named
            for option in action.option_strings
        ]
        name = word.lstrip("-").replace("_", "-").lower()
        bare = {option.lstrip("-"): option for option in known}
        name = re.sub(r"^(n|num|number-of)-", "", name)
        near = difflib.get_close_matches(name, bare, n=3, cutoff=0.7)
        swapped = [option for option in bare if sorted(option) == sorted(name)]  # letters in another order
        close = [SYNONYMS.get(name, ""), SYNONYMS.get(f"{name}s", ""), *swapped, *near]
        right = next((bare[option] for option in close if option in bare and not _lacks(option, name)), "")
        lists = f"'fedstill {self.command} {self.all_by}' lists all flags"
        return InputError("flag", Shown(word), f"{right}? ({lists})" if right else f"left out ({lists})")


def _lacks(option: str, name: str) -> bool:
    """Return whether a flag is what was written without one of its words, and so another thing.

    >>> _lacks("decay", "lr-decay"), _lacks("batch-size", "batchsize")
    (True, False)
    """
    return set(option.split("-")) < set(name.split("-"))


def add(parser: Parser, cls: type, only: Iterable[str] | None = None) -> None:
    """Add a settings class's flags in their groups, or with `only` those of these fields; existing flags stay."""
    names = None if only is None else set(only)
    existing = {action.dest for action in parser._actions}
    fields = [f for f in settings.fields_of(cls) if (names is None or f.name in names) and f.name not in existing]
    titles = {f.metadata["group"]: None for f in fields}
    rank = {title: i for i, title in enumerate(ORDER)}
    for title in sorted(titles, key=lambda title: rank.get(title, len(ORDER))):
        group = _group(parser, title)
        for field in (f for f in fields if f.metadata["group"] == title):
            _add_field(parser, group, cls, field)


def add_methods(parser: Parser, methods: Mapping[str, type[Method]], beside: type) -> None:
    """Add the methods' own flags: a group for each method, and one for the flags that several of them have.

    Where `beside`, the class of the experiment, has a field of the same name, the flag sets the method's field for methods that
    have it and the experiment's for the others (see `job.plan`); its help describes both.
    """
    owners: dict[str, list[type[Method]]] = {}
    for cls in methods.values():
        for field in settings.fields_of(cls):
            owners.setdefault(field.name, []).append(cls)
    common = {field.name for field in settings.fields_of(beside)}
    parser.owners = {name: {cls.id for cls in of} for name, of in owners.items() if name not in common}
    both = {f.name: f for f in settings.fields_of(beside) if 0 < len(owners.get(f.name, ())) < len(methods)}
    for name, field in both.items():
        descriptions = [f"{cls.id}'s own: {_describe_of(cls, name)}" for cls in owners.pop(name)]
        help = "; ".join([describe(field), *descriptions])
        _add_field(parser, _group(parser, field.metadata["group"]), beside, field, help)
    shared = {name: classes for name, classes in owners.items() if len(classes) > 1}
    if shared:
        group = parser.add_argument_group("flags of several methods")
        for name, classes in shared.items():
            _add_shared(parser, group, name, classes)
    for cls in methods.values():
        own = [f for f in settings.fields_of(cls) if f.name not in shared and f.name not in both]
        if own:
            group = parser.add_argument_group(f"{cls.id} ({cls.paper})" if cls.paper else cls.id)
        for field in own:
            _add_field(parser, group, cls, field)


def plain(parser: Parser, group: argparse._ArgumentGroup, name: str, help: str, metavar: str, takes: str) -> None:
    """Add a flag of the command itself, which is no field of a settings class."""
    group.add_argument(flag(name), dest=name, metavar=metavar, help=_escape(help))
    parser.takes[name] = takes


def add_wide(parser: Parser, group: argparse._ArgumentGroup) -> None:
    """Add the flag --wide, which is no setting of a run."""
    group.add_argument("--wide", dest="wide", action="store_true", help="all columns of the table in a narrow terminal")
    parser.takes["wide"] = "left without a value"


def take(cls: type, flag_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of those flags that are fields of a settings class, in the fields' types."""
    types = settings.types_of(cls)
    return {
        f.name: _typed(f, types[f.name], flag_values[f.name]) for f in settings.fields_of(cls) if f.name in flag_values
    }


def whole_number(flag_values: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    """Return the value of a plain flag that takes a whole number."""
    text = flag_values.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InputError(flag(name), text, f"a whole number at least {least}")
    return value


@contextmanager
def named(flag_values: Mapping[str, Any]) -> Iterator[None]:
    """Within, an error about a field that a flag set names the flag."""
    try:
        yield
    except InputError as error:
        if error.field in flag_values:
            raise InputError(flag(error.field), error.value, error.right) from None
        raise


def _add_field(
    parser: Parser, group: argparse._ArgumentGroup, cls: type, field: dataclasses.Field[Any], help: str = ""
) -> None:
    """Add the flag of a settings class's field."""
    annotation = settings.types_of(cls)[field.name]
    _add(group, field.name, annotation, help or describe(field))
    parser.takes[field.name] = _takes(field, annotation)


def _add(group: argparse._ArgumentGroup, name: str, annotation: Any, help: str) -> None:
    option, help = flag(name), _escape(help)
    if annotation is bool:
        group.add_argument(option, dest=name, action=argparse.BooleanOptionalAction, help=help)
    elif get_origin(annotation) is tuple:
        group.add_argument(option, dest=name, nargs="*", metavar=_metavar(get_args(annotation)[0]), help=help)
    else:
        group.add_argument(option, dest=name, metavar=_metavar(annotation), help=help)


def _add_shared(parser: Parser, group: argparse._ArgumentGroup, name: str, classes: Sequence[type[Method]]) -> None:
    """Add one flag for several methods, which may differ in help and default."""
    fields = {cls.id: next(f for f in settings.fields_of(cls) if f.name == name) for cls in classes}
    helps = _by_owner({owner: str(field.metadata["help"]) for owner, field in fields.items()})
    defaults = _by_owner({owner: _default(field.default) for owner, field in fields.items()})
    limits = _by_owner({owner: settings.limits(field.metadata) for owner, field in fields.items()})
    about = "; ".join(text for text in (limits, f"default {defaults}") if text)
    owners = f"; of {', '.join(fields)}" if ":" not in helps + defaults + limits else ""
    _add_field(parser, group, classes[0], next(iter(fields.values())), f"{helps} [{about}{owners}]")


def _by_owner(texts: Mapping[str, str]) -> str:
    """Return the text that all methods share, or each text with its methods."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    owners: dict[str, list[str]] = {}
    for owner, text in texts.items():
        owners.setdefault(text or "no limits", []).append(owner)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in owners.items())


def _group(parser: Parser, title: str) -> argparse._ArgumentGroup:
    """Return the group of flags with this title; make it where there is none."""
    groups = [group for group in parser._action_groups if group.title == title]
    return groups[0] if groups else parser.add_argument_group(title)


def _describe_of(cls: type[Method], name: str) -> str:
    """Return a description of a method's field, with what it takes in words."""
    field = next(f for f in settings.fields_of(cls) if f.name == name)
    return describe(field, settings.types_of(cls)[name])


def describe(field: dataclasses.Field[Any], annotation: Any = None) -> str:
    """Return a field's help with its limits and default; with an annotation, also what it takes in words."""
    facts = settings.limits(field.metadata) if annotation is None else _takes(field, annotation)
    return f"{field.metadata['help']} [{f'{facts}; ' if facts else ''}default {_default(field.default)}]"


def _default(value: object) -> str:
    """Return a default as one would write it after the flag."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _escape(help: str) -> str:
    return help.replace("%", "%%")


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    return {int: "N", float: "X", str: "TEXT"}[annotation]


def _takes(field: dataclasses.Field[Any], annotation: Any) -> str:
    """Return in words which values a field takes."""
    return " ".join(text for text in (settings.kind(annotation), settings.limits(field.metadata)) if text)


def _typed(field: dataclasses.Field[Any], annotation: Any, value: Any) -> Any:
    """Return a flag's text in the field's type; the settings class itself checks the limits."""
    if annotation is bool:
        return value  # argparse has made True of --x and False of --no-x
    if get_origin(annotation) is tuple:
        return tuple(_typed(field, get_args(annotation)[0], item) for item in value)
    if get_origin(annotation) is Literal:
        options = {str(choice): choice for choice in get_args(annotation)}
        if value not in options:
            raise InputError(flag(field.name), value, nearest(value, options))
        return options[value]
    make: Callable[[str], Any] = annotation
    try:
        return make(value)
    except ValueError:
        raise InputError(flag(field.name), value, _takes(field, annotation)) from None
