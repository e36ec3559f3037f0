"""Which runs of a folder were trained together: groups.json, in the order in which they began."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..core import files
from ..core.errors import InputError
from ..core.files import Damaged, write

GROUPS = "groups.json"


def damaged(folder: Path, name: str, problem: str) -> InputError:
    """Return the refusal of a folder one of whose files is not as it was written."""
    each = "'fedstill resume' of a run's own folder in it still works"
    return InputError("folder", str(folder), f"a folder whose {name} is as fedstill wrote it ({problem}); {each}")


@dataclasses.dataclass
class Groups:
    """Which runs of a folder are trained together; each is named by its folder within the job's."""

    folder: Path | None  # None: nothing is kept
    log: list[list[str]] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, folder: Path | None) -> Groups:
        """Return the groups that began before; none where none did. Refuse a file that is damaged."""
        if folder is None or not (folder / GROUPS).exists():
            return cls(folder)
        try:
            log = files.unseal(folder / GROUPS)["groups"]
        except Damaged as error:
            raise damaged(folder, GROUPS, str(error)) from None
        return cls(folder, log)

    def check(self, begun: Sequence[str]) -> None:
        """Refuse to divide runs that have begun, and of which nobody knows with which others."""
        lost = set(begun) - {name for group in self.log for name in group}
        if lost and self.folder is not None:
            raise damaged(self.folder, GROUPS, f"it does not name {min(lost)}")

    def begin(self, names: Sequence[str]) -> None:
        """Note that these runs now begin together."""
        if self.folder is not None:
            self.log.append(list(names))
            write(self.folder / GROUPS, files.seal({"groups": self.log}))

    def divide(self, names: Sequence[str]) -> list[list[str]]:
        """Divide runs that go on into those that were trained together, and at the end those that had not begun.

        The last group in which a run began counts, if all that began with it are still in it; a group that was given up for
        smaller ones had trained nothing.
        """
        last = {name: number for number, group in enumerate(self.log) for name in group}
        groups = []
        for number, group in enumerate(self.log):
            if all(last[name] == number for name in group):
                groups.append([name for name in group if name in names])
        begun = {name for group in groups for name in group}
        rest = [name for name in names if name not in begun]
        return [group for group in [*groups, rest] if group]
