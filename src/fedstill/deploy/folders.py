"""The folders of a hub and of a site: who they are, whom they trust, and what FLARE reads (`flare/`, which no user needs to see).

HUB    hub.json   root/  (the root's key)   sites/NAME.crt   revoked.json   runs/   flare/
SITE   site.json  site.key                  runs/            flare/
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import InputError
from ..core.version import __version__
from . import certificates

FORMAT = 1
LOOPBACK = ("localhost", "127.0.0.1")
HEARTBEAT = 20  # seconds without a sign after which FLARE forgets a site
HUB_CLASS, SITE_CLASS = "fedstill.deploy.flare.HubPart", "fedstill.deploy.flare.SitePart"
NOBODY = {role: "none" for role in ("project_admin", "org_admin", "lead", "member")}  # whom FLARE's own console obeys


@dataclass(frozen=True)
class Hub:
    """A hub's folder."""

    folder: Path
    name: str
    host: str
    port: int

    @classmethod
    def init(cls, folder: Path, name: str, host: str, port: int) -> Hub:
        """Make a hub: its root, its own certificate, and what FLARE reads."""
        certificates.check_name("name", name)
        check_host(host, port)
        if folder.exists() and any(folder.iterdir()):
            raise InputError("hub", str(folder), "a folder that is new or empty")
        files.make_folder(folder)
        folder.chmod(0o700)
        hub = cls(folder, name, host, port)
        root_key = certificates.new_key(folder / "root" / "root.key")
        ca = certificates.root(f"{name}-root", root_key)
        files.write(folder / "root" / "root.crt", certificates.pem(ca).encode())
        key = certificates.new_key(hub.startup / "server.key")
        hosts = tuple(dict.fromkeys((host, *LOOPBACK)))
        own = certificates.certify(name, key.public_key(), ca, root_key, hosts)
        files.write(hub.startup / "server.crt", certificates.pem(own).encode())
        files.write(hub.startup / "rootCA.pem", certificates.pem(ca).encode())
        files.make_folder(folder / "sites")
        files.make_folder(folder / "runs")
        _write(folder / "revoked.json", {"revoked": []})
        hub.write_flare()
        _write(folder / "hub.json", {"format": FORMAT, "name": name, "host": host, "port": port})
        return hub

    @classmethod
    def at(cls, folder: Path) -> Hub:
        """Return the hub that `init` made in a folder."""
        about = _read("hub", folder, "hub.json", "fedstill hub init")
        return cls(folder, str(about["name"]), str(about["host"]), int(about["port"]))

    @property
    def flare(self) -> Path:
        """The folder that FLARE's server works in."""
        return self.folder / "flare"

    @property
    def startup(self) -> Path:
        """The folder of certificates and of FLARE's own settings."""
        return self.flare / "startup"

    def approve(self, text: str, where: str) -> dict[str, Any]:
        """Return the kit for the site that has made a request: its certificate, the root, and where the hub is."""
        asked = _parse("request", where, text, ("name", "request"))
        name = certificates.check_name("request", str(asked["name"]))
        if name in self.revoked():
            raise InputError("request", name, "a name that was not revoked: a site that comes back takes another")
        public = certificates.read_request(where, name, str(asked["request"]))
        ca = certificates.read("root.crt", (self.folder / "root" / "root.crt").read_text())
        known = self.folder / "sites" / f"{name}.crt"
        if known.exists() and certificates.read(known.name, known.read_text()).public_key() != public:
            raise InputError("request", name, "a name that no other site has: another key was approved under it")
        signed = certificates.certify(name, public, ca, certificates.read_key(self.folder / "root" / "root.key"))
        files.write(known, certificates.pem(signed).encode())
        where_it_is = {"hub": self.name, "host": self.host, "port": self.port, "version": __version__}
        papers = {"certificate": certificates.pem(signed), "root": certificates.pem(ca)}
        return {"format": FORMAT, "name": name, **where_it_is, **papers}

    def sites(self) -> list[str]:
        """Return the names of all sites that were approved and not revoked, sorted: client numbers are places in this list."""
        return sorted({file.stem for file in (self.folder / "sites").glob("*.crt")} - self.revoked())

    def revoked(self) -> set[str]:
        """Return the sites that may not take part any more."""
        return {str(name) for name in json.loads((self.folder / "revoked.json").read_text())["revoked"]}

    def revoke(self, name: str) -> None:
        """Have a site's certificate refused from now on."""
        if not (self.folder / "sites" / f"{name}.crt").exists():
            raise InputError("site", name, f"one of {', '.join(self.sites()) or 'the approved sites (there are none)'}")
        _write(self.folder / "revoked.json", {"revoked": sorted(self.revoked() | {name})})

    def write_flare(self) -> None:
        """Write what FLARE's server reads: its address, where it keeps things, and that nobody may send it jobs."""
        service = {"target": f"{self.host}:{self.port}", "scheme": "grpc"}
        own = {"ssl_private_key": "server.key", "ssl_cert": "server.crt", "ssl_root_cert": "rootCA.pem"}
        server = {"name": self.name, "service": service, "admin_server": self.host, "admin_port": self.port, **own}
        server |= {"connection_security": "mtls", "auth_identity": self.name}
        _write(self.startup / "fed_server.json", {"format_version": 2, "servers": [server]})
        common = "nvflare.app_common."
        store = f"{common}storages.filesystem_storage.FilesystemStorage"
        snapshots = {"path": store, "args": {"root_dir": str(self.flare / "snapshots"), "uri_root": "/"}}
        persistor = f"{common}state_persistors.storage_state_persistor.StorageStatePersistor"
        parts = {  # FLARE's server does not start without the first three
            "job_scheduler": (f"{common}job_schedulers.job_scheduler.DefaultJobScheduler", {"max_jobs": 1}),
            "job_manager": (
                "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                {"uri_root": str(self.flare / "jobs"), "job_store_id": "job_store"},
            ),
            "job_store": (store, {}),
            "fedstill": (HUB_CLASS, {"folder": str(self.folder.absolute())}),
        }
        resources = {
            "format_version": 2,
            **_only(HUB_CLASS),
            "servers": [{"admin_storage": "transfer", "max_num_clients": 10000, "heart_beat_timeout": HEARTBEAT}],
            "snapshot_persistor": {"path": persistor, "args": {"uri_root": "/", "storage": snapshots}},
            "components": [{"id": name, "path": path, "args": args} for name, (path, args) in parts.items()],
        }
        _write_local(self.flare, resources)


@dataclass(frozen=True)
class Site:
    """A site's folder."""

    folder: Path
    name: str
    hub: str = ""  # empty: it has not joined yet
    host: str = ""
    port: int = 0

    @classmethod
    def request(cls, folder: Path, name: str) -> dict[str, Any]:
        """Make a site with its own key; return the request that its hub is to approve."""
        certificates.check_name("name", name)
        if folder.exists() and any(folder.iterdir()):
            raise InputError("folder", str(folder), "a folder that is new or empty")
        files.make_folder(folder)
        folder.chmod(0o700)
        key = certificates.new_key(folder / "site.key")
        asked = {"format": FORMAT, "name": name, "version": __version__, "request": certificates.request(name, key)}
        _write(folder / "site.json", {"format": FORMAT, "name": name})
        return asked

    @classmethod
    def at(cls, folder: Path) -> Site:
        """Return the site of a folder."""
        about = _read("folder", folder, "site.json", "fedstill site request")
        return cls(
            folder,
            str(about["name"]),
            str(about.get("hub", "")),
            str(about.get("host", "")),
            int(about.get("port", 0)),
        )

    @property
    def flare(self) -> Path:
        """The folder that FLARE's client works in."""
        return self.folder / "flare"

    def join(self, text: str, where: str) -> Site:
        """Take the kit that the hub has made for this site."""
        kit = _parse("kit", where, text, ("name", "hub", "host", "port", "certificate", "root"))
        ca = certificates.read(where, str(kit["root"]))
        own = certificates.read(where, str(kit["certificate"]))
        certificates.check_signed(where, own, ca, self.name)
        if own.public_key() != certificates.read_key(self.folder / "site.key").public_key():
            raise InputError("kit", where, "made from this site's own request: the certificate is for another key")
        host, port = str(kit["host"]), int(kit["port"])
        check_host(host, port)
        startup = self.flare / "startup"
        files.write(startup / "client.crt", certificates.pem(own).encode())
        files.write(startup / "rootCA.pem", certificates.pem(ca).encode())
        files.make_folder(startup)
        key = startup / "client.key"
        key.unlink(missing_ok=True)
        key.symlink_to(Path("..") / ".." / "site.key")
        joined = Site(self.folder, self.name, certificates.check_name("kit", str(kit["hub"])), host, port)
        joined.write_flare()
        about = {"hub": joined.hub, "host": host, "port": port}
        _write(self.folder / "site.json", {"format": FORMAT, "name": self.name, **about})
        return joined

    def write_flare(self) -> None:
        """Write what FLARE's client reads: where the hub is, and that it takes no jobs."""
        service = {"target": f"{self.host}:{self.port}", "scheme": "grpc"}
        own = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
        servers = [{"name": self.hub, "service": service, "identity": self.hub}]
        client = {**own, "fqsn": self.name, "is_leaf": True, "connection_security": "mtls"}
        startup = {"format_version": 2, "servers": servers, "client": client}
        _write(self.flare / "startup" / "fed_client.json", startup)
        part = {"id": "fedstill", "path": SITE_CLASS, "args": {"folder": str(self.folder.absolute())}}
        resources = {
            "format_version": 2,
            **_only(SITE_CLASS),
            "client": {"retry_timeout": 30, "client_register_interval": 1.0, "communication_timeout": 30.0},
            "components": [part],
        }
        _write_local(self.flare, resources)


def check_host(host: str, port: int) -> None:
    """Refuse an address that sites could not connect to."""
    if not host or not host.isprintable() or any(sign in host for sign in " /:@"):
        raise InputError("host", host, "the name or IPv4 address under which sites reach the hub")
    if not 1 <= port <= 65535:
        raise InputError("port", port, "from 1 to 65535")


def _only(name: str) -> dict[str, Any]:
    """Return that a job may build no class, not even FLARE's own, but for ours."""
    return {"class_list_enforcement_mode": "enforce", "class_allow_list": [name]}


def _write_local(flare: Path, resources: Mapping[str, Any]) -> None:
    """Write the settings that lie in FLARE's folder `local`."""
    local = flare / "local"
    _write(local / "resources.json", resources)
    _write(local / "authorization.json", {"format_version": "1.0", "permissions": NOBODY})
    _write(local / "comm_config.json", {"allow_adhoc_conns": False})
    line = {"()": "logging.Formatter", "fmt": "%(asctime)s %(levelname)s %(name)s %(message)s"}
    out = {"class": "logging.StreamHandler", "level": "INFO", "formatter": "line", "stream": "ext://sys.stderr"}
    logs = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": {"out": out},
        "root": {"level": "INFO", "handlers": ["out"]},
    }
    _write(local / "log_config.json", logs)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    files.write(path, (json.dumps(content, indent=2) + "\n").encode())


def _read(field: str, folder: Path, name: str, made_by: str) -> dict[str, Any]:
    """Return the content of the file that says what a folder is."""
    try:
        return _parse(field, str(folder), (folder / name).read_text(encoding="utf-8"), ("name",))
    except OSError:
        raise InputError(field, str(folder), f"a folder that '{made_by}' has made") from None


def _parse(field: str, where: str, text: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return a JSON object that holds these names."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or any(name not in content for name in names):
        raise InputError(field, where, f"a file with {', '.join(names)}")
    if content.get("format") != FORMAT:
        raise InputError(field, where, f"of format {FORMAT}, as fedstill {__version__} writes it")
    return content


def remove(folder: Path) -> None:
    """Remove a folder with all that it holds."""
    shutil.rmtree(folder, ignore_errors=True)
