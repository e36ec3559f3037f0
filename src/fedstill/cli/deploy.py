"""The commands of a deployment: hub, site, deploy-demo. What they do is in `deployed`, which needs the extra deploy."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from ..core.errors import InputError, nearest
from ..deploy.process import check_installed
from ..methods import METHODS
from ..run.experiment import Experiment
from . import flags
from .deployment import OPTIONS, SWITCHES
from .screen import say

HUB_WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "init": ("make a hub, with a root certificate and its own", ("name", "host", "port")),
    "approve": ("REQUEST: certify a site that asks; the kit goes back to it", ("file",)),
    "start": ("start the hub, and go on with what it was at", ("foreground",)),
    "run": (
        "METHOD|FILE.toml: run an experiment with the sites",
        ("name", "sites", "wait", "round_deadline", "audit"),
    ),
    "canary": (
        "METHOD|FILE.toml: look at every site and make one round, before the real run",
        ("sites", "wait"),
    ),
    "status": ("show who is here, the round, and what was refused", ("web",)),
    "audit": ("RUN: check a run's log and records, and merge what was kept again", ()),
    "stop": ("stop the hub; nothing is lost", ()),
    "revoke": ("NAME: refuse a site from now on", ()),
}
SITE_WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "request": ("NAME: make a site with a key of its own, and a request for its hub", ("file",)),
    "join": ("KIT: take what the hub has approved", ()),
    "start": (
        "start the site",
        (
            "data",
            "split",
            "objective",
            "label",
            "ignore",
            "encode",
            "site_device",
            "monitor",
            "save_every_epochs",
            "save_every_steps",
            "max_epsilon",
            "audit",
            "foreground",
        ),
    ),
    "status": ("show whether the site is at work, and its models", ()),
    "audit": ("check the site's logs, and train what was kept again", ()),
    "stop": ("stop the site; nothing is lost", ()),
}


def run_hub(argv: Sequence[str]) -> None:
    """`fedstill hub`."""
    about = "A hub of real sites, which keep their data. It needs the extra deploy (NVIDIA FLARE)."
    examples = (
        "fedstill hub init --name study --host hub.example.org",
        "fedstill hub run pfedsd --rounds 20 --model cnn-fmnist",
    )
    _dispatch("hub", HUB_WORDS, about, examples, argv)


def run_site(argv: Sequence[str]) -> None:
    """`fedstill site`."""
    about = "A site: its data and its model stay where it is. It needs the extra deploy (NVIDIA FLARE)."
    examples = ("fedstill site request clinic-bern", "fedstill site start --data /data/ecg.npz --monitor 'load<0.8'")
    _dispatch("site", SITE_WORDS, about, examples, argv)


def _dispatch(
    command: str,
    actions: Mapping[str, tuple[str, tuple[str, ...]]],
    about: str,
    examples: Sequence[str],
    argv: Sequence[str],
) -> None:
    """Run the action that the first word names."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        lines = [f"usage: fedstill {command} WORD [flags]", "", about, ""]
        lines += [f"  {name:<9} {text}" for name, (text, _) in actions.items()]
        say("\n".join([*lines, "", "examples:", *(f"  {line}" for line in examples)]))
        return
    if argv[0] not in actions:
        raise InputError(command, argv[0], nearest(argv[0], actions))
    text, options = actions[argv[0]]
    parser = flags.Parser(f"{command} {argv[0]}", text, examples=[line for line in examples if f" {argv[0]} " in line])
    group = parser.add_argument_group("deployment")
    for name in ("folder", *options):
        _option(parser, group, name)
    if command == "hub" and argv[0] in ("run", "canary"):
        flags.add_methods(parser, METHODS, Experiment)
        flags.add(parser, Experiment)
    given, words = parser.read(argv[1:])
    if "help" in given:
        parser.print_help()
        return
    if ":" not in text and words:
        raise InputError("argument", words[0], f"left out: fedstill {command} {argv[0]} takes flags only")
    check_installed()
    from . import deployed

    deployed.ACTIONS[command, argv[0]](given, words)


def _option(parser: flags.Parser, group: argparse._ArgumentGroup, name: str) -> None:
    if name in SWITCHES:
        group.add_argument(f"--{name}", action="store_true", help=SWITCHES[name])
        return
    flags.plain(parser, group, name, OPTIONS[name][1], OPTIONS[name][0], OPTIONS[name][1].partition(" [")[0])


# ---- fedstill deploy-demo --------------------------------------------------------------------------------------------
ABOUT = (
    "Start a hub and some sites as processes on this machine, with certificates and mutual TLS; run pFedSD on handwritten "
    "digits, of which every site has its own; show each site's accuracy beside training alone; remove everything."
)


def run_demo(argv: Sequence[str]) -> None:
    """`fedstill deploy-demo`."""
    parser = flags.Parser(
        "deploy-demo", ABOUT, "", ("fedstill deploy-demo", "fedstill deploy-demo --sites 5 --rounds 20")
    )
    group = parser.add_argument_group("deployment")
    flags.plain(parser, group, "sites", "how many sites [at least 2; default 3]", "N", "a whole number at least 2")
    flags.add(parser, Experiment, only=["rounds", "seed", "lr", "epochs"])
    given, words = parser.read(argv)
    if "help" in given:
        parser.print_help()
        return
    if words:
        raise InputError("argument", words[0], "left out")
    check_installed()
    from . import deployed

    deployed.demonstrate(given)
