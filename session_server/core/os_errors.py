"""Say what the operating system has refused, in words for people."""

from __future__ import annotations

import errno
import os
import pwd
from typing import Final

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a disk says that is full, or a quota that is."""


def user_name() -> str:
    """Return the name of the user whose permissions this process has; its number if it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def in_words(error: Exception) -> str:
    """Return what went wrong without the number and the quotes of the interpreter: "talk.json: file
    exists". Other exceptions speak for themselves, or have their name."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    told = error.strerror[:1].lower() + error.strerror[1:]
    return told if error.filename is None else f"{error.filename}: {told}"
