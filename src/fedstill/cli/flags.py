"""Flags from settings: a field `batch_size` is the flag `--batch-size`, with the field's own help, limits and default.

Values are read as texts and typed here, by the field, so that a refusal names the flag, the value and what is right.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

from ..core import settings
from ..core.errors import InputError, Shown, nearest
from ..core.method import Method

ORDER = ("data", "model", "federation", "local training", "server", "time", "machine")  # of the groups in the help
SYNONYMS = {  # what people write who come from elsewhere
    "alpha": "partition",
    "dataset": "data",
    "gpu": "device",
    "learning-rate": "lr",
    "local-epochs": "epochs",
    "output": "out",
    "temperature": "tau",
}


def flag(name: str) -> str:
    """A field's flag.

    >>> flag("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """One command's flags. What is no flag comes back as a list of words, wherever it stands."""

    def __init__(self, command: str, about: str, words: str = "", examples: Sequence[str] = ()) -> None:
        width = min(shutil.get_terminal_size().columns, 120)
        super().__init__(
            prog=f"fedstill {command}",
            usage=" ".join(part for part in (f"fedstill {command}", words, "[flags]") if part),
            description=textwrap.fill(about, width - 2),
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=width),
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,
        )
        self.command = command
        self.rights: dict[str, str] = {"help": "left without a value"}  # by field: what follows its flag
        self._optionals.title = "help"
        self.add_argument("-h", "--help", action="store_true", help="show this and stop")

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """The flags that were given, by field, and the words; an unknown flag is refused with the nearest right one."""
        try:
            found, rest = self.parse_known_args(list(argv))
        except argparse.ArgumentError as error:
            action = next(a for a in self._actions if "/".join(a.option_strings) == error.argument_name)
            if "ignored" in error.message:
                text = f"{action.option_strings[0]} with {error.message.removeprefix('ignored explicit argument ')}"
                raise InputError("flag", Shown(text), f"{error.argument_name} without a value") from None
            raise InputError(action.option_strings[0], Shown("nothing"), self.rights[action.dest]) from None
        for word in rest:
            if word.startswith("-"):
                raise self._unknown(word.partition("=")[0])
        return vars(found), rest

    def _unknown(self, word: str) -> InputError:
        known = [option for action in self._actions for option in action.option_strings]
        name = word.lstrip("-").replace("_", "-").lower()
        bare = {option.lstrip("-"): option for option in known}
        close = [SYNONYMS.get(name, ""), *difflib.get_close_matches(name, bare, n=1, cutoff=0.6)]
        right = next((bare[option] for option in close if option in bare), "")
        lists = f"'fedstill {self.command} --help' lists all flags"
        return InputError("flag", Shown(word), f"{right}? ({lists})" if right else f"left out ({lists})")


def add(parser: Parser, cls: type, only: Iterable[str] | None = None) -> None:
    """A settings class's flags in their groups; with `only` these fields alone. A flag that is there already stays."""
    names = None if only is None else set(only)
    there = {action.dest for action in parser._actions}
    fields = [f for f in settings.fields_of(cls) if (names is None or f.name in names) and f.name not in there]
    found = {f.metadata["group"]: None for f in fields}
    rank = {group: i for i, group in enumerate(ORDER)}
    for group in sorted(found, key=lambda g: rank.get(g, len(ORDER))):
        place = _group(parser, group)
        for field in (f for f in fields if f.metadata["group"] == group):
            annotation = settings.types_of(cls)[field.name]
            _add(parser, place, field.name, annotation, describe(field))
            parser.rights[field.name] = _right(field, annotation)


def add_methods(parser: Parser, methods: Mapping[str, type[Method]], beside: type) -> None:
    """The methods' own flags: a group for each method, and one for the flags that several of them have.

    Where `beside`, the class of the experiment, has a field by the same name, the flag is the method's for methods that have
    it and the experiment's for the others (`plan` gives it to each); its help says both.
    """
    owners: dict[str, list[type[Method]]] = {}
    for cls in methods.values():
        for field in settings.fields_of(cls):
            owners.setdefault(field.name, []).append(cls)
    both = {f.name: f for f in settings.fields_of(beside) if 0 < len(owners.get(f.name, ())) < len(methods)}
    for name, field in both.items():
        theirs = [f"{cls.id}'s own: {_told(cls, name)}" for cls in owners.pop(name)]
        annotation = settings.types_of(beside)[name]
        place = _group(parser, field.metadata["group"])
        _add(parser, place, name, annotation, "; ".join([describe(field), *theirs]))
        parser.rights[name] = _right(field, annotation)
    shared = {name: having for name, having in owners.items() if len(having) > 1}
    if shared:
        place = parser.add_argument_group("flags of several methods")
        for name, having in shared.items():
            _add_shared(parser, place, name, having)
    for cls in methods.values():
        own = [f for f in settings.fields_of(cls) if f.name not in shared and f.name not in both]
        if own:
            place = parser.add_argument_group(f"{cls.id} ({cls.paper})" if cls.paper else cls.id)
        for field in own:
            annotation = settings.types_of(cls)[field.name]
            _add(parser, place, field.name, annotation, describe(field))
            parser.rights[field.name] = _right(field, annotation)


def plain(parser: Parser, group: argparse._ArgumentGroup, name: str, help: str, metavar: str, right: str) -> None:
    """A flag of the command itself, which is no field of a settings class."""
    group.add_argument(flag(name), dest=name, metavar=metavar, help=_escape(help))
    parser.rights[name] = right


def take(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The typed values of those given flags that are fields of a settings class."""
    hints = settings.types_of(cls)
    return {f.name: _typed(f, hints[f.name], given[f.name]) for f in settings.fields_of(cls) if f.name in given}


def whole(given: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    """The value of a plain flag that takes a whole number."""
    text = given.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InputError(flag(name), text, f"a whole number at least {least}")
    return value


@contextmanager
def named(given: Mapping[str, Any]) -> Iterator[None]:
    """Within, a refused field that came from a flag is named as the flag."""
    try:
        yield
    except InputError as error:
        if error.field in given:
            raise InputError(flag(error.field), error.value, error.right) from None
        raise


def _add(parser: Parser, group: argparse._ArgumentGroup, name: str, annotation: Any, help: str) -> None:
    option, help = flag(name), _escape(help)
    if annotation is bool:
        group.add_argument(option, dest=name, action=argparse.BooleanOptionalAction, help=help)
    elif get_origin(annotation) is tuple:
        group.add_argument(option, dest=name, nargs="*", metavar=_metavar(get_args(annotation)[0]), help=help)
    else:
        group.add_argument(option, dest=name, metavar=_metavar(annotation), help=help)


def _add_shared(parser: Parser, group: argparse._ArgumentGroup, name: str, having: Sequence[type[Method]]) -> None:
    """One flag for several methods, which may differ in help and default."""
    own = {cls.id: next(f for f in settings.fields_of(cls) if f.name == name) for cls in having}
    annotation = settings.types_of(having[0])[name]
    helps = _by_owner({owner: str(field.metadata["help"]) for owner, field in own.items()})
    defaults = _by_owner({owner: _default(field.default) for owner, field in own.items()})
    limits = _by_owner({owner: settings.limits(field.metadata) for owner, field in own.items()})
    about = "; ".join(part for part in (limits, f"default {defaults}") if part)
    owners = f"; of {', '.join(own)}" if ":" not in helps + defaults + limits else ""
    _add(parser, group, name, annotation, f"{helps} [{about}{owners}]")
    parser.rights[name] = _right(next(iter(own.values())), annotation)


def _by_owner(texts: Mapping[str, str]) -> str:
    """One text where all methods have the same; else each text with its methods."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    together: dict[str, list[str]] = {}
    for owner, text in texts.items():
        together.setdefault(text or "no limits", []).append(owner)
    return "; ".join(f"{', '.join(owners)}: {text}" for text, owners in together.items())


def _group(parser: Parser, title: str) -> argparse._ArgumentGroup:
    """The group of flags by this title, made where it is not there yet."""
    found = [group for group in parser._action_groups if group.title == title]
    return found[0] if found else parser.add_argument_group(title)


def _told(cls: type[Method], name: str) -> str:
    """What a method's field takes, in words, with its help."""
    field = next(f for f in settings.fields_of(cls) if f.name == name)
    return describe(field, settings.types_of(cls)[name])


def describe(field: dataclasses.Field[Any], annotation: Any = None) -> str:
    """A field's help with its limits and default; where the annotation is given, also what it takes in words."""
    facts = settings.limits(field.metadata) if annotation is None else _right(field, annotation)
    return f"{field.metadata['help']} [{f'{facts}; ' if facts else ''}default {_default(field.default)}]"


def _default(value: object) -> str:
    """A default as one would write it after the flag."""
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


def _right(field: dataclasses.Field[Any], annotation: Any) -> str:
    return " ".join(part for part in (settings.kind(annotation), settings.limits(field.metadata)) if part)


def _typed(field: dataclasses.Field[Any], annotation: Any, given: Any) -> Any:
    """A flag's text in the field's type; limits are checked by the settings class itself."""
    if annotation is bool:
        return given  # argparse made it from --x or --no-x
    if get_origin(annotation) is tuple:
        return tuple(_typed(field, get_args(annotation)[0], item) for item in given)
    if get_origin(annotation) is Literal:
        options = {str(value): value for value in get_args(annotation)}
        if given not in options:
            raise InputError(flag(field.name), given, nearest(given, options))
        return options[given]
    make: Callable[[str], Any] = annotation
    try:
        return make(given)
    except ValueError:
        raise InputError(flag(field.name), given, _right(field, annotation)) from None
