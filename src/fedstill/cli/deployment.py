"""What the commands of a deployment have in common: their flags and defaults."""

HUB, SITE = "fedstill-hub", "fedstill-site"
PORT = 8102
START = 20.0  # seconds that a command waits until what it has started is up
OPTIONS = {  # by flag: its value's name, and its help
    "folder": ("FOLDER", "the folder of the hub or site [default fedstill-hub or fedstill-site]"),
    "name": ("NAME", "of the hub, or of a run: a-z, 0-9 and -"),
    "host": ("HOST", "the name or IPv4 address under which sites reach the hub"),
    "port": ("PORT", f"the one port that sites must reach [default {PORT}]"),
    "file": ("FILE", "where to write what is handed on"),
    "data": ("PATH", "an npz or CSV file, or a folder; nothing else is ever read"),
    "label": ("COLUMN", "the column of the labels in CSV files, by name [default label, y or the last]"),
    "ignore": ("COLUMNS", "columns of CSV files to leave out, by name, with commas"),
    "encode": ("onehot:COLUMNS", "columns of CSV files that are categories whatever they hold"),
    "split": ("A/B", "divides data without a test part of its own into train and test [default 80/20]"),
    "objective": (
        "NAME",
        "classification, regression, multilabel or tokens [default auto: as the site's targets are]",
    ),
    "site_device": ("DEVICE", "auto, cpu, cuda or cuda:N [default auto]"),
    "monitor": ("CONDITIONS", "work only if these hold, as battery>20,load<0.8"),
    "web": ("PORT", "show it as a page on http://127.0.0.1:PORT instead, for this machine alone, until Ctrl-C"),
    "save_every_epochs": (
        "N",
        "keep a round under way after every N epochs, to go on there after a kill [default: each epoch that leaves at most "
        "a twentieth of the time to it]",
    ),
    "save_every_steps": ("N", "keep a round under way after every N steps"),
    "max_epsilon": (
        "EPSILON",
        "take part in runs with --privacy local alone, and stop before all of them together cost more [default: no bound]",
    ),
    "sites": ("NAMES", "the sites that take part, joined by commas; for deploy-demo their number [default all, 3]"),
    "wait": ("SECONDS", "how long sites that are away are waited for before the first round [default 120]"),
    "round_deadline": (
        "SECONDS",
        "end a round without the sites that have not answered; auto: as the slowest site needs, with a margin "
        "[default 0: wait for all]",
    ),
}
BOTH = ("label", "ignore", "encode")  # options of a site that are settings of an experiment, too
SITE_ONLY = (
    "data",
    "split",
    "objective",
    "site_device",
    "monitor",
    "save_every_epochs",
    "save_every_steps",
    "max_epsilon",
)
SWITCHES = {
    "foreground": "stay in this terminal, as a service manager wants it",
    "audit": "keep all replies (at a site: all orders), so that rounds can be done again: a model for each client and round",
}
