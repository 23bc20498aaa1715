"""Between taking a directory and opening its file: may liblmdb have it?

A process that vanished is normal (kill -9 loses nothing), so one is no reason to check; but a
damaged file kills whoever opens it, again and again. Hence the rules, in this order:

    the meta pages are wrong                            set aside, begin anew
    the file lacks pages it counts                      check
    liblmdb itself reported damage last time            check
    a process vanished while it was inside liblmdb      check: a damaged page may have killed it
    two processes in a row vanished                     check
    another boot, and the last writer had not synced    check: LMDB without fsync survives no reboot
    nobody knows where the file comes from              check
    else                                                open at once

"Check" is O(n) and runs in a child process, in the background, with the directory held alone.
"""

from dataclasses import replace
from pathlib import Path

from kvstore.disk import schema
from kvstore.disk.attach import ATTACH_FILE, Attachment, Header, boot_id
from kvstore.disk.structure import (
    DATA_FILE,
    Finding,
    Soundness,
    check_deep,
    check_light,
    database_names,
    pad_to_last_page,
    set_aside,
)
from kvstore.errors import ConfigError, TierBrokenError


def settle(attachment: Attachment, data_file: Path, *, raise_on_damage: bool) -> str | None:
    """With the directory held alone: why the file must be checked first, None for open at once.

    Sets a file aside that is plainly damaged (raises ``TierBrokenError`` instead, if told to), and
    forgets those who vanished once they have been counted.
    """
    vanished, known = attachment.vanished(), attachment.read_header()
    header = known or Header()
    finding = _check_light(data_file)
    if finding.soundness is Soundness.DAMAGED:
        give_up_file(data_file, finding.reason, raise_on_damage=raise_on_damage)
        finding = Finding(Soundness.EMPTY)
    num_vanished = header.num_vanished + len(vanished)
    doubt = None
    if finding.soundness is Soundness.DOUBTFUL:
        doubt = finding.reason
    elif finding.soundness is Soundness.SOUND:
        if header.suspicion:
            doubt = f"liblmdb reported {header.suspicion}"
        elif any(holder.was_inside for holder in vanished):
            doubt = "a process ended inside the database"
        elif num_vanished > 1:
            doubt = f"{num_vanished} processes in a row ended without closing the cache"
        elif header.unsynced_boot not in (None, boot_id()):
            doubt = "the machine was restarted before the cache was synced"
        elif known is None:
            doubt = f"{DATA_FILE} came here without its history"
    if doubt is not None:
        attachment.claim_slot()  # so that others can say who keeps them waiting
        return f"checking {data_file}: {doubt}"
    attachment.forget_vanished()
    if finding.soundness is Soundness.EMPTY:
        header, num_vanished = Header(), 0
    attachment.write_header(replace(header, num_vanished=num_vanished))
    return None


def settle_by_deep_check(
    attachment: Attachment, data_file: Path, *, raise_on_damage: bool
) -> str | None:
    """With the directory held alone: walk the whole file; what was wrong, if anything.

    A damaged file is set aside (or raises ``TierBrokenError``); afterwards the history is clean.
    """
    finding = _check_light(data_file)
    problem = None
    if finding.soundness is Soundness.DAMAGED:
        problem = finding.reason
    elif finding.soundness is not Soundness.EMPTY:
        problem = next(iter(check_deep(data_file)), None)
    if problem is not None:
        give_up_file(data_file, problem, raise_on_damage=raise_on_damage)
    elif finding.soundness is Soundness.DOUBTFUL:
        pad_to_last_page(data_file, finding)
    attachment.forget_vanished()
    attachment.write_header(Header())
    return problem


def require_sound(attachment: Attachment, data_file: Path) -> Finding:
    """With the directory shared: the finding about a file that may be opened now.

    Raises ``TierBrokenError`` for another: nothing is checked or set aside while others are here.
    """
    finding = _check_light(data_file)
    reason = finding.reason
    num_inside = sum(holder.was_inside for holder in attachment.vanished())
    if finding.soundness is Soundness.SOUND and num_inside > 1 and attachment.holders():
        reason = f"{num_inside} processes ended inside the database"
    if reason:
        holders = ", ".join(map(str, attachment.holders()))
        remedy = (
            f"it is in use by {holders}; end that, and it is checked at the next start"
            if holders
            else f"run: kvstore verify {data_file.parent} --fix"
        )
        raise TierBrokenError(f"{data_file} may be damaged ({reason}); {remedy}", tier="disk")
    return finding


def give_up_file(data_file: Path, reason: str, *, raise_on_damage: bool) -> None:
    if raise_on_damage:
        raise TierBrokenError(
            f"{data_file} is damaged ({reason}); run: kvstore verify {data_file.parent} --fix",
            tier="disk",
        )
    set_aside(data_file, reason)


def _check_light(data_file: Path) -> Finding:
    finding = check_light(data_file)
    if finding.soundness is Soundness.FOREIGN:
        raise ConfigError(f"{data_file}: {finding.reason}; choose another directory")
    return finding


def is_ours(directory: Path) -> bool:
    """Whether the directory is a cache, or has no database yet.

    Where attached processes have met it is one, whatever became of the file. Elsewhere its database
    must have our tables: nothing of another's is ever set aside.
    """
    if (directory / ATTACH_FILE).exists():
        return True
    finding = check_light(directory / DATA_FILE)
    if finding.soundness in (Soundness.DAMAGED, Soundness.FOREIGN):
        return False
    names = database_names(directory / DATA_FILE, finding)
    return names == [] or (
        names is not None and {schema.INDEX, schema.META, schema.RECENCY} <= set(names)
    )
