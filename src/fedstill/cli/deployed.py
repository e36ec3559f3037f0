"""What the commands hub, site and deploy-demo do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import data as sources
from ..core import files, reading
from ..core.errors import InputError, Shown, TrainingError
from ..core.metric import measure_of
from ..core.training import REAL
from ..data import Federation
from ..deploy import audit, demo, hub, jobs, process, web
from ..deploy.certificates import fingerprint, read
from ..deploy.data import SiteData
from ..deploy.disclosure import told
from ..deploy.folders import Hub, Site
from ..deploy.privacy_log import secret_in
from ..deploy.process import Settings
from ..methods import get
from ..run import simulation
from ..run.experiment import Experiment
from . import flags, train
from .deployment import BOTH, HUB, OPTIONS, PORT, SITE, SITE_ONLY, START, SWITCHES
from .job import plan
from .screen import say

Action = Callable[[Mapping[str, Any], Sequence[str]], None]


# ---- fedstill hub ----------------------------------------------------------------------------------------------------
def _hub_init(given: Mapping[str, Any], words: Sequence[str]) -> None:
    for name in ("name", "host"):
        if name not in given:
            raise InputError(f"--{name}", Shown("nothing"), OPTIONS[name][1])
    port = flags.whole_number(given, "port", PORT)
    made = Hub.init(_folder(given, HUB), given["name"], given["host"], port)
    ca = read("root", (made.folder / "root" / "root.crt").read_text())
    say(f"hub {made.name} in {made.folder}; sites will connect to {made.host}:{made.port}")
    say(f"fingerprint of its root, to compare by telephone: {fingerprint(ca)}")


def _hub_approve(given: Mapping[str, Any], words: Sequence[str]) -> None:
    (file,) = _words(words, "REQUEST")
    made = Hub.at(_folder(given, HUB))
    kit = made.approve(_text("request", file), file)
    out = Path(given.get("file", f"{kit['name']}.kit"))
    files.write(out, (json.dumps(kit, indent=2) + "\n").encode())
    say(f"site {kit['name']} is approved; send it {out}, which holds no secret")


def _hub_start(given: Mapping[str, Any], words: Sequence[str]) -> None:
    made = Hub.at(_folder(given, HUB))
    if "foreground" in given:
        process.foreground("hub", made.folder)
    keeper = process.launch("hub", made.folder)
    if not process.wait_until_up("hub", made.folder, keeper, 3 * START):
        process.stop(made.folder)
        raise InputError(
            "folder", str(made.folder), f"that of a hub that starts; its log ends: {process.tail(made.folder)}"
        )
    say(f"hub {made.name} listens on {made.host}:{made.port}")


def _asked(given: Mapping[str, Any], words: Sequence[str]) -> tuple[Hub, Experiment, list[str]]:
    """Return the hub, the experiment and the sites that a command names; the hub must be at work."""
    (what,) = _words(words, "METHOD|FILE.toml")
    made = Hub.at(_folder(given, HUB))
    for name in SITE_ONLY:
        if name in given:
            flag = flags.flag(name)
            raise InputError(flag, given[name], f"left out: a site's owner says it (fedstill site start {flag})")
    base = train._base(what)
    settings = {name for name in given if name in BOTH or (name not in OPTIONS and name not in SWITCHES)}
    own = {name: value for name, value in given.items() if name in settings}
    if "mode" in own or "wait_free" in own:
        own.setdefault("profile", REAL)
    with flags.named(own):
        experiment = plan([base.method], base, own, "run").first
    hub.check(experiment)
    if not process.running(made.folder):
        raise InputError("folder", str(made.folder), "that of a hub that is at work: fedstill hub start")
    return made, experiment, [name.strip() for name in given["sites"].split(",")] if "sites" in given else made.sites()


def _hub_run(given: Mapping[str, Any], words: Sequence[str]) -> None:
    made, experiment, sites = _asked(given, words)
    auto = given.get("round_deadline") == "auto"
    deadline = _seconds({} if auto else given, "round_deadline", 0.0)
    wait, names = _seconds(given, "wait", 120.0), sorted(sites)
    folder = jobs.submit(
        made,
        experiment,
        sites,
        name=given.get("name", ""),
        deadline="auto" if auto else deadline,
        wait=wait,
        audit="audit" in given,
    )
    say(f"{folder.name}: {experiment.method.id} with {', '.join(names)}; to stop watching press Ctrl-C, it goes on")
    for record in jobs.follow(folder, lambda: bool(process.running(made.folder))):
        say(_line(record, experiment.rounds, names))
    say(f"results in {folder / jobs.RUN}; each site has its own model in its folder")


def _hub_canary(given: Mapping[str, Any], words: Sequence[str]) -> None:
    made, experiment, sites = _asked(given, words)
    folder = jobs.submit(made, experiment, sites, wait=_seconds(given, "wait", 20.0), canary=True)
    failed: TrainingError | None = None
    try:
        for _ in jobs.follow(folder, lambda: bool(process.running(made.folder))):
            pass
    except TrainingError as error:
        failed = error
    outcome = reading.read_json(folder / jobs.OUTCOME) if (folder / jobs.OUTCOME).exists() else {"rows": []}
    say(
        f"{'site':<20} {'samples':>8} {'classes':>8} {'shape':>14} {'memory':>9} {'disk':>9} {'clock':>8} {'a round':>9}"
    )
    for row in outcome.get("rows", []):
        shape = "×".join(map(str, row["shape"]))
        took = f"{row['seconds']:.1f} s" if "seconds" in row else "-"
        room = " ".join(f"{row[kind] / 1e9:>6.1f} GB" for kind in ("memory", "disk"))
        say(
            f"{row['site']:<20} {row['samples']:>8} {row['classes']:>8} {shape:>14} {room} {row['clock']:>+6.1f} s {took:>9}"
        )
    if failed is not None:
        raise failed
    say("all sites are ready")


def _hub_status(given: Mapping[str, Any], words: Sequence[str]) -> None:
    made = Hub.at(_folder(given, HUB))
    if "web" in given:
        _show(made, flags.whole_number(given, "web", 0, 0))
        return
    at_work = process.running(made.folder)
    say(f"hub {made.name} on {made.host}:{made.port}: {f'at work (process {at_work})' if at_work else 'stopped'}")
    try:
        status = reading.read_json(made.folder / jobs.STATUS)
    except reading.Unreadable:
        status = {"sites": {}, "run": {}, "refused": []}
    now = status["run"]
    if now and at_work:
        say(f"run {now['run']}: round {now['round']} of {now['rounds']}")
    for name in made.sites():
        known = status["sites"].get(name, {"state": "never seen"})
        state = known["state"] if at_work else "unknown"
        say(f"  {name:<20} {state:<10} {known.get('received', 0):>12,} bytes received")
    for name in sorted(made.revoked()):
        say(f"  {name:<20} revoked")
    for refused in status["refused"][-5:]:
        say(f"  refused: {refused['site']}: {refused['reason']}")


def _show(made: Hub, port: int) -> None:
    """Show the hub's page until Ctrl-C."""
    if port > 65535:
        raise InputError("--web", port, "from 1 to 65535, or 0 for any that is free")
    with web.server(made, port) as server, contextlib.suppress(KeyboardInterrupt):
        say(f"hub {made.name}: http://{web.HOST}:{server.server_port} (this machine only; Ctrl-C ends it)")
        server.serve_forever()


def _hub_audit(given: Mapping[str, Any], words: Sequence[str]) -> None:
    (name,) = _words(words, "RUN")
    made = Hub.at(_folder(given, HUB))
    run = made.folder / "runs" / name / jobs.RUN
    if not (run / hub.DEPLOYMENT).exists():
        raise InputError("run", name, f"one of the folders in {run.parents[1]}")
    _report(
        f"run {name}: log, records, uploads and merged models",
        audit.of_hub(run, secret_in(made.folder)),
    )


def _hub_stop(given: Mapping[str, Any], words: Sequence[str]) -> None:
    made = Hub.at(_folder(given, HUB))
    say(f"hub {made.name} {'is stopped' if process.stop(made.folder) else 'was not at work'}")


def _hub_revoke(given: Mapping[str, Any], words: Sequence[str]) -> None:
    (name,) = _words(words, "NAME")
    Hub.at(_folder(given, HUB)).revoke(name)
    say(f"site {name} is refused from now on")


# ---- fedstill site ---------------------------------------------------------------------------------------------------
def _site_request(given: Mapping[str, Any], words: Sequence[str]) -> None:
    (name,) = _words(words, "NAME")
    folder = _folder(given, SITE)
    asked = Site.request(folder, name)
    out = Path(given.get("file", f"{name}.request"))
    files.write(out, (json.dumps(asked, indent=2) + "\n").encode())
    say(f"site {name} in {folder}, where its key stays; send {out} to the hub, which approves it")


def _site_join(given: Mapping[str, Any], words: Sequence[str]) -> None:
    (file,) = _words(words, "KIT")
    joined = Site.at(_folder(given, SITE)).join(_text("kit", file), file)
    ca = read("root", (joined.flare / "startup" / "rootCA.pem").read_text())
    say(f"site {joined.name} belongs to hub {joined.hub} at {joined.host}:{joined.port}")
    say(f"fingerprint of the hub's root, to compare by telephone: {fingerprint(ca)}")


def _site_start(given: Mapping[str, Any], words: Sequence[str]) -> None:
    site = Site.at(_folder(given, SITE))
    if not site.hub:
        raise InputError("folder", str(site.folder), "that of a site that has joined: fedstill site join KIT")
    process.check_installed()
    if "data" in given:
        path = str(Path(given["data"]).absolute())
        device, split = given.get("site_device", "auto"), given.get("split", "80/20")
        most = _number(given, "max_epsilon", 0.0, "a number")
        kept: dict[str, Any] = {
            name: flags.whole_number(given, name, 0, 0) for name in ("save_every_epochs", "save_every_steps")
        }
        monitor, objective = given.get("monitor", ""), given.get("objective", "auto")
        columns = {name: given[name] for name in ("label", "ignore", "encode") if name in given}
        settings = Settings(
            path, split, device, monitor, "audit" in given, **kept, max_epsilon=most, objective=objective, **columns
        )
    elif (site.folder / "settings.json").exists():
        settings = Settings.read(site.folder)
    else:
        raise InputError("--data", Shown("nothing"), "an npz or CSV file, or a folder: this site's own samples")
    settings.policy()
    own = SiteData.read(**settings.reading())
    sizes = own.about()["sizes"]
    process.check_stopped("site", site.folder)
    for line in [] if own.raw is None else told(own.raw.data):
        say(line)
    settings.write(site.folder)
    if "foreground" in given:
        process.foreground("site", site.folder)
    keeper = process.launch("site", site.folder)
    known = process.wait_until_up("site", site.folder, keeper, START)
    say(f"site {site.name} is at work with {sizes['train']} training and {sizes['test']} test samples")
    if not known:
        say(f"hub {site.hub} has not answered yet; the site keeps asking (log: {site.folder / 'log.txt'})")


def _site_status(given: Mapping[str, Any], words: Sequence[str]) -> None:
    site = Site.at(_folder(given, SITE))
    at_work = process.running(site.folder)
    say(f"site {site.name}: {f'at work (process {at_work})' if at_work else 'stopped'}; hub {site.hub or '(none yet)'}")
    for model in sorted((site.folder / "runs").glob("*/personal.safetensors")):
        say(f"  its model: {model}")


def _site_audit(given: Mapping[str, Any], words: Sequence[str]) -> None:
    site = Site.at(_folder(given, SITE))
    settings = Settings.read(site.folder)
    own = SiteData.read(**settings.reading())
    for run in sorted((site.folder / "runs").glob("*")):
        _report(
            f"run {run.name}: log, orders and replies", audit.of_site(run, own, settings.device, secret_in(site.folder))
        )


def _report(what: str, wrong: Sequence[str]) -> None:
    """Say that all is as it was, or raise what is not."""
    if wrong:
        raise TrainingError(f"{what.partition(':')[0]}: {'; '.join(wrong)}")
    say(f"{what} are as they were, to the bit")


def _site_stop(given: Mapping[str, Any], words: Sequence[str]) -> None:
    site = Site.at(_folder(given, SITE))
    say(f"site {site.name} {'is stopped' if process.stop(site.folder) else 'was not at work'}")


ACTIONS: dict[tuple[str, str], Action] = {
    ("hub", "init"): _hub_init,
    ("hub", "approve"): _hub_approve,
    ("hub", "start"): _hub_start,
    ("hub", "run"): _hub_run,
    ("hub", "canary"): _hub_canary,
    ("hub", "status"): _hub_status,
    ("hub", "audit"): _hub_audit,
    ("hub", "stop"): _hub_stop,
    ("hub", "revoke"): _hub_revoke,
    ("site", "request"): _site_request,
    ("site", "join"): _site_join,
    ("site", "start"): _site_start,
    ("site", "status"): _site_status,
    ("site", "audit"): _site_audit,
    ("site", "stop"): _site_stop,
}


# ---- fedstill deploy-demo --------------------------------------------------------------------------------------------
def demonstrate(given: Mapping[str, Any]) -> None:
    """Run the demo with these flags."""
    count = flags.whole_number(given, "sites", 3, 2)
    with flags.named(given):
        values = {"rounds": 10, **flags.take(Experiment, given)}
        experiment = Experiment(method=get("pfedsd")(), device="cpu", **values)
        alone = Experiment(method=get("local")(), device="cpu", **values)
    digits = sources.load("digits")
    federation = Federation.from_dataset(digits, partition="dirichlet:0.3", clients=count, seed=experiment.seed)
    names = [f"site-{k + 1}" for k in range(count)]
    with demo.party(federation, names, say) as party:
        folder = jobs.submit(party.hub, experiment, names)
        last: dict[str, Any] = {}
        for last in jobs.follow(folder, lambda: bool(process.running(party.hub.folder))):
            say(_line(last, experiment.rounds, names))
    own = simulation.run(alone, federation=federation).history[-1]
    say(f"\n{'site':<10} {'samples':>8} {'together':>9} {'alone':>9}")
    for k, name in enumerate(names):
        here, there = (record["personal_clients"][str(k)] for record in (last, own))
        say(f"{name:<10} {len(federation.clients[k].y_train):>8} {here:>9.1%} {there:>9.1%}")
    say(f"{'mean':<10} {'':>8} {last['personal']:>9.1%} {own['personal']:>9.1%}")
    say("\nprocesses ended, folders removed; docs/deployment.md does the same on machines of your own")


# ---- helpers ---------------------------------------------------------------------------------------------------------
def _line(record: Mapping[str, Any], rounds: int, names: Sequence[str]) -> str:
    """Return a round in a line: how good, how long, and who was missing."""
    measure = measure_of("", record)
    accuracy = (
        f"personal {measure.words(record['personal'], 1).replace(' %', '%')}"
        if "personal" in record
        else f"loss {record['loss']:.3f}"
    )
    away = [names[k] for k in record.get("missing", ())]
    missing = f", without {', '.join(away)}" if away else ""
    return f"round {record['round']}/{rounds}: {accuracy}, {record['seconds']:.1f} s{missing}"


def _folder(given: Mapping[str, Any], default: str) -> Path:
    return Path(given.get("folder", default))


def _text(field: str, file: str) -> str:
    try:
        return reading.read_text(file)
    except reading.Unreadable as error:
        raise InputError(field, file, str(error)) from None


def _words(words: Sequence[str], what: str) -> Sequence[str]:
    """Return a command's one word."""
    if len(words) != 1:
        raise InputError("argument", Shown(" ".join(words) or "nothing"), f"one {what}")
    return words


def _seconds(given: Mapping[str, Any], name: str, default: float) -> float:
    return _number(given, name, default, "a number of seconds")


def _number(given: Mapping[str, Any], name: str, default: float, right: str) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise InputError(flags.flag(name), given[name], right)
    return value
