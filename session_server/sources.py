"""Read the settings of `serve` from a configuration file, the environment and flags.

A flag wins over a variable, a variable over the file, the file over the default. Every value knows
where it came from, so that an error can say where to mend it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from session_server.config import Settings
from session_server.core.environment import CPU_VARIABLE
from session_server.core.nearest import did_you_mean, nearest
from session_server.core.owner import KEY_FILE_VARIABLE, KEY_VARIABLE
from session_server.flags import FLAGS, Given, Place, validated

PREFIX: Final = "SESSION_SERVER_"
CONFIG_VARIABLE: Final = "SESSION_SERVER_CONFIG"
MAX_CONFIG_BYTES: Final = 1 << 20
"""Maximum size of a configuration file."""

KEY_PLACE: Final = ("http", "api_key")
_SERVICE_LINK: Final = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_URL: Final = re.compile(r"(tcp|udp|sctp)://")
"""What Kubernetes tells every pod of each service; one may have our name: SESSION_SERVER_PORT."""

_OWN_VARIABLES: Final[Mapping[Place, str]] = {
    KEY_PLACE: KEY_VARIABLE,
    ("http", "api_key_file"): KEY_FILE_VARIABLE,
}
"""Settings whose variables other commands read too."""

_FLAG_WORD: Final = re.compile(r"--[a-z-]+")

PLACES: Final[tuple[Place, ...]] = tuple((flag.part, flag.field) for flag in FLAGS)


class _Variables(Settings, BaseSettings):
    """Name the variables as pydantic-settings does: SESSION_SERVER_HTTP__PORT."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", enable_decoding=False
    )


class _Environment(EnvSettingsSource):
    """Read what it is given, which need not be the environment of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {name.lower(): value for name, value in environment.items()}
        super().__init__(_Variables)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return dict(self._environment)


@dataclass(frozen=True, slots=True)
class Sourced:
    """Hold the settings and the origin of each that is not the default; `file` is the one read,
    `names` are the flags of settings that were given elsewhere, with their name there."""

    settings: Settings
    origins: Mapping[Place, str]
    file: Path | None
    names: Mapping[str, str]

    @property
    def has_key_in_file(self) -> bool:
        """Return whether the configuration file holds a key."""
        return self.file is not None and self.origins.get(KEY_PLACE) == str(self.file)

    def worded(self, told: str) -> str:
        """Return a message about flags with the names under which the settings were given."""
        return _FLAG_WORD.sub(lambda flag: self.names.get(flag[0], flag[0]), told)


def variable_of(place: Place) -> str:
    """Return the name of the environment variable of a setting."""
    return _OWN_VARIABLES.get(place, f"{PREFIX}{'__'.join(place)}".upper())


def read_sources(
    flags: Mapping[Place, Given], *, environment: Mapping[str, str], file: Path | None
) -> Sourced:
    """Return the settings that all sources give together.

    Args:
        flags: what the command line says.
        file: the one that `--config` names; None takes that of SESSION_SERVER_CONFIG, if any.

    Raises:
        ValueError: the file cannot be used, a name is unknown, or a value is out of bounds; the
            message says where.
    """
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    given = dict(_from_file(file)) if file is not None else {}
    given |= dict(_from_environment(environment))
    given |= flags
    default = Settings()
    for (part, name), value in given.items():
        means_nothing = (part, name) != KEY_PLACE and getattr(getattr(default, part), name) != ""
        if value.value == "" and means_nothing:  # a variable of a shell that was not set
            raise ValueError(f"{value.name} is empty: leave it out, or give it a value")
    settings = validated(given)
    names = {
        name: given[flag.part, flag.field].name
        for flag in FLAGS
        for name in flag.names
        if (flag.part, flag.field) in given.keys() - flags.keys()
    }
    return Sourced(settings, {place: value.source for place, value in given.items()}, file, names)


def shown_settings(sourced: Sourced, *, has_variable_key: bool) -> str:
    """Return all settings as a configuration file, each with its origin; secrets are left out.

    `has_variable_key`: whether SESSION_SERVER_API_KEY is set, which counts beside other keys.
    """
    lines: list[str] = []
    for part in type(sourced.settings).model_fields:
        lines += ["", f"[{part}]"] if lines else [f"[{part}]"]
        section = getattr(sourced.settings, part)
        for name in type(section).model_fields:
            value, origin = getattr(section, name), sourced.origins.get((part, name), "default")
            lines.append(f"{_shown(name, value)}  # {origin}")
            if (part, name) == KEY_PLACE and has_variable_key:
                lines.append(f"# {KEY_VARIABLE} is set: its key counts too")
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return f"# {name} is not set"
    if isinstance(value, SecretStr):
        return f"# {name} is set, and not shown"
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    if isinstance(value, tuple):
        return f"{name} = {json.dumps(value, ensure_ascii=False)}"
    if isinstance(value, int | float):
        return f"{name} = {value!r}"
    text = value.value if isinstance(value, Enum) else str(value)
    return f"{name} = {json.dumps(text, ensure_ascii=False)}"


def _from_file(file: Path) -> Iterator[tuple[Place, Given]]:
    try:
        num_bytes = file.stat().st_size
        readable = file if num_bytes <= MAX_CONFIG_BYTES else None
        sections = TomlConfigSettingsSource(_Variables, toml_file=readable).toml_data
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits, too
        raise ValueError(f"{file} is not TOML: {error}") from None
    if readable is None:
        raise ValueError(f"{file} has {num_bytes} bytes, more than {MAX_CONFIG_BYTES}")
    if not file.is_file():
        raise ValueError(f"cannot read {file}: it is no file")
    for part, section in sections.items():
        if part not in Settings.model_fields or not isinstance(section, dict):
            raise ValueError(f"{file}: there is no section [{part}]{_hint((part,))}")
        for name, value in section.items():
            if (part, name) not in PLACES:
                raise ValueError(f"{file}: there is no {part}.{name}{_hint((part, name))}")
            yield (part, name), Given(value, str(file), f"{file}: {part}.{name}")


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[Place, Given]]:
    names = {variable_of(place): place for place in PLACES}
    known = {*names, CONFIG_VARIABLE, CPU_VARIABLE}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and not _is_of_service(name, environment):
            hint = did_you_mean(nearest(name, known - {CPU_VARIABLE}))
            raise ValueError(f"there is no variable {name}{hint}")
        if name in names and name != KEY_VARIABLE and not environment[name]:
            raise ValueError(f"{name} is empty: unset it, or give it a value")
    if path := environment.get(KEY_FILE_VARIABLE):
        place = names[KEY_FILE_VARIABLE]
        yield place, Given(path, KEY_FILE_VARIABLE, KEY_FILE_VARIABLE)
    ours = {name: environment[name] for name in names if name in environment}
    for part, section in _Environment(ours)().items():
        for name, value in section.items():
            variable = variable_of((part, name))
            yield (part, name), Given(value, variable, variable)


def _is_of_service(name: str, environment: Mapping[str, str]) -> bool:
    """Return whether a variable tells of a service of Kubernetes and was meant for nobody."""
    is_url = name.endswith("_PORT") and _LINK_URL.match(environment[name]) is not None
    return is_url or _SERVICE_LINK.fullmatch(name) is not None


def _hint(path: tuple[str, ...]) -> str:
    """Suggest the setting that somebody may have meant, by its place, its key or its flag."""
    spellings = {f"{part}.{name}": f"{part}.{name}" for part, name in PLACES}
    for flag in FLAGS:
        for word in (flag.field, *(name.lstrip("-").replace("-", "_") for name in flag.names)):
            spellings.setdefault(word, f"{flag.part}.{flag.field}")
    spellings |= {part: f"[{part}]" for part in Settings.model_fields if len(path) == 1}
    asked = path[-1].replace("-", "_")
    exact = next((each for each in (".".join(path), asked) if each in spellings), None)
    meant = exact or nearest(asked, spellings)
    return did_you_mean(spellings[meant] if meant else None)
