"""Read calls of tools in the notations that chat templates teach their models.

Which markers enclose calls is a format's; the notations differ in how they begin, so each is read
wherever a call may stand:

    {"name": "f", "arguments": {"x": 1}}             Hermes, Qwen, Llama, Granite, Phi, Mistral
    <function=f><parameter=x>1</parameter></function>                           Qwen3-Coder, Qwen3.5
    f(x=1)                                                                            LFM2, OLMo 3
    f[ARGS]{"x": 1}                                                                     Mistral
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>                       DeepSeek
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from session_server.text.answer_literals import SPACE, read_string, read_value
from session_server.text.answer_pieces import CallCollector
from session_server.text.answer_source import AnswerSource, Markers, Reading

MAX_NAME_CHARS: Final = 256

DEEPSEEK_BEGIN: Final = "<｜tool▁call▁begin｜>"
DEEPSEEK_SEP: Final = "<｜tool▁sep｜>"
DEEPSEEK_END: Final = "<｜tool▁call▁end｜>"
MISTRAL_ARGS: Final = "[ARGS]"
MISTRAL_ID: Final = "[CALL_ID]"
FUNCTION: Final = "<function="

_NAME: Final = re.compile(r"[\w.:/-]+")
_PARAMETER_END: Final = Markers(["</parameter>"])
_CALL_END: Final = "</tool_call>"
_STRING_KINDS: Final = {"string", "null"}
_KINDS: Final = {str: "string", type(None): "null"}

StringParameters = Mapping[str, Mapping[str, bool]]
"""Of each function, the parameters that are declared as strings, and whether they may be null."""


class CallReader:
    """Read calls from a source into a collector.

    A method returns whether it read a call to its end. If not, what is left of the text is still in
    the source's record. A call begins once its name is known and its arguments start; from there on
    its arguments are collected as they come.
    """

    def __init__(
        self, source: AnswerSource, calls: CallCollector, strings: StringParameters
    ) -> None:
        self._source = source
        self._calls = calls
        self._strings = strings

    def read_list(self, end: str) -> Reading[bool]:
        """Read calls up to the marker `end`, in brackets or not; where `end` is empty there is
        none."""
        source = self._source
        yield from source.run(SPACE)
        closer = "]" if (yield from source.accept("[")) else end
        while (yield from self.read_call(is_marked=True)):
            yield from source.run(SPACE)
            if (yield from source.accept(",")) or (yield from source.accept(";")):
                continue
            if source.is_at_end or not closer:
                return True
            if (yield from source.accept(closer)):
                yield from source.run(SPACE)
                if closer == "]" and end:
                    yield from source.accept(end)
                return True
        return False

    def read_bare(self) -> Reading[bool]:
        """Read calls as JSON objects that no marker introduces, parted by semicolons or space."""
        source = self._source
        while (yield from self.read_call(is_marked=False)):
            yield from source.run(SPACE)
            if not (yield from source.accept(";")) and (yield from source.peek()) != "{":
                return True
        return False

    def read_call(self, *, is_marked: bool) -> Reading[bool]:
        """Read one call, of any notation if it is marked as one."""
        source = self._source
        yield from source.run(SPACE)
        if (yield from source.accept("{")):
            is_whole = yield from _ObjectReader(source, self._calls, takes_any=is_marked).read()
        elif not is_marked:
            is_whole = False
        elif (yield from source.accept(FUNCTION)):
            is_whole = yield from self.read_function()
        elif (yield from source.accept(DEEPSEEK_BEGIN)):
            is_whole = yield from self._read_deepseek()
        else:
            is_whole = yield from self._read_named()
        if is_whole:
            source.forget()
        return is_whole

    def read_arguments(self, name: str) -> Reading[bool]:
        """Read the arguments of a function as an object."""
        yield from self._source.run(SPACE)
        if not is_name(name) or (yield from self._source.peek()) != "{":
            return False
        self._calls.begin(name)
        self._source.forget()
        return (yield from _collect(self._source, self._calls))

    def read_function(self) -> Reading[bool]:
        """Read what follows `<function=`."""
        source = self._source
        name = yield from source.run(_NAME)
        if not is_name(name) or not (yield from source.accept(">")):
            return False
        separator = ""
        while True:
            yield from source.run(SPACE)
            if (yield from source.accept("</function>")):
                break
            if (yield from source.peek(len(_CALL_END))) == _CALL_END:
                break  # some models leave the inner end out
            if not (yield from source.accept("<parameter=")):
                return False
            key = yield from source.run(_NAME)
            if not is_name(key) or not (yield from source.accept(">")):
                return False
            if not separator:
                self._calls.begin(name)
            self._calls.add(f"{separator or '{'}{_quoted(key)}: ")
            source.forget()
            separator = ", "
            may_be_null = self._strings.get(name, {}).get(key)
            if not (yield from self._read_parameter(may_be_null=may_be_null)):
                return False
        if not separator:
            self._calls.begin(name)
        self._calls.add("}" if separator else "{}")
        return True

    def _read_parameter(self, *, may_be_null: bool | None) -> Reading[bool]:
        """Read a parameter up to its end tag. `may_be_null`: None for one that is no string."""
        pieces: list[str] = []
        scan, num_scanned = _TagScan(), 0
        while (tag := (yield from self._source.until(_PARAMETER_END, pieces.append))) is not None:
            text = "".join(pieces[num_scanned:])
            if may_be_null is not None or not scan.is_in_string(text):
                break
            pieces.append(tag)
            num_scanned = len(pieces)
        is_whole = tag is not None
        value = "".join(pieces).removeprefix("\n")
        value = value.removesuffix("\n") if is_whole else value
        if not is_whole:
            self._calls.add(_quoted(value)[:-1])  # cut off as the answer is
        elif may_be_null is None or (may_be_null and value in ("null", "None")):
            self._calls.add((yield from _as_json(value)))
        else:
            self._calls.add(_quoted(value))
        self._source.forget()
        return is_whole

    def _read_named(self) -> Reading[bool]:
        """Read a call that begins with its function's name."""
        source = self._source
        name = yield from source.run(_NAME)
        if (yield from source.accept("(")):
            return is_name(name) and (yield from self._read_python(name))
        if (yield from source.accept(MISTRAL_ID)):
            yield from source.run(_NAME)
        yield from source.accept(MISTRAL_ARGS)
        return (yield from self.read_arguments(name))

    def _read_python(self, name: str) -> Reading[bool]:
        """Read keyword arguments up to the closing parenthesis."""
        source, calls = self._source, self._calls
        separator = "{"
        while True:
            yield from source.run(SPACE)
            if (yield from source.accept(")")):
                break
            key = yield from source.run(_NAME)
            yield from source.run(SPACE)
            if not is_name(key) or not (yield from source.accept("=")):
                return False
            if separator == "{":
                calls.begin(name)
            calls.add(f"{separator}{_quoted(key)}: ")
            source.forget()
            separator = ", "
            yield from source.run(SPACE)
            if not (yield from _collect(source, calls)):
                return False
            yield from source.run(SPACE)
            if not (yield from source.accept(",")) and (yield from source.peek()) != ")":
                return False
        if separator == "{":
            calls.begin(name)
        calls.add("}" if separator == ", " else "{}")
        return True

    def _read_deepseek(self) -> Reading[bool]:
        """Read what follows the begin of one call: the name, and in V3 a fence around JSON."""
        source = self._source
        name = yield from source.run(_NAME)
        if not (yield from source.accept(DEEPSEEK_SEP)):
            return False
        yield from source.run(SPACE)
        if (yield from source.peek()) != "{":  # what came first is the word "function"
            name = yield from source.run(_NAME)
            yield from source.run(SPACE)
            yield from source.accept("```json")
        if not (yield from self.read_arguments(name)):
            return False
        yield from source.run(SPACE)
        if (yield from source.accept("```")):
            yield from source.run(SPACE)
        yield from source.accept(DEEPSEEK_END)
        return True


class _ObjectReader:
    """Read a call that is an object, after its opening brace.

    `takes_any`: whether it may have other members, or no arguments.
    """

    def __init__(self, source: AnswerSource, calls: CallCollector, *, takes_any: bool) -> None:
        self._source = source
        self._calls = calls
        self._takes_any = takes_any
        self._name = ""
        self._early: list[str] | None = None
        """Arguments that came before the name."""

    def read(self) -> Reading[bool]:
        source = self._source
        while True:
            key = yield from self._read_text()
            yield from source.run(SPACE)
            if key is None or not (yield from source.accept(":")):
                return False
            yield from source.run(SPACE)
            if not (yield from self._read_member(key)):
                return False
            yield from source.run(SPACE)
            if (yield from source.accept("}")):
                return self._close()
            if not (yield from source.accept(",")):
                return False

    def _read_member(self, key: str) -> Reading[bool]:
        if key == "name":
            name = yield from self._read_text()
            if name is None or self._name or not is_name(name):
                return False
            self._name = name
            if self._early is not None:
                self._begin("".join(self._early))
            return True
        if key in ("arguments", "parameters"):
            return self._early is None and (yield from self._read_arguments())
        if not self._takes_any and key not in ("type", "id"):
            return False
        return (yield from read_value(self._source, _ignore))

    def _read_arguments(self) -> Reading[bool]:
        """Read an object; or one as a string, or none."""
        source = self._source
        self._early = []
        opener = yield from source.peek()
        if opener == "{" and self._name:
            self._begin("")
            return (yield from _collect(source, self._calls))
        if opener == "{":
            return (yield from read_value(source, self._early.append))
        if opener == "n":
            is_read = yield from source.accept("null")
            arguments = "{}"
        else:
            arguments = (yield from self._read_text()) or ""
            is_read = bool(arguments)
        if is_read and self._name:
            self._begin(arguments)
        self._early.append(arguments)
        return is_read

    def _close(self) -> bool:
        if not self._name:
            return False
        if self._early is None and self._takes_any:
            self._begin("{}")
            return True
        return self._early is not None

    def _begin(self, arguments: str) -> None:
        self._calls.begin(self._name)
        self._calls.add(arguments)
        self._source.forget()

    def _read_text(self) -> Reading[str | None]:
        """Read a string; None if there is none, or one that UTF-8 cannot hold."""
        yield from self._source.run(SPACE)
        pieces: list[str] = []
        if not (yield from read_string(self._source, pieces.append)):
            return None
        text: str = json.loads("".join(pieces))
        return text if _is_unicode(text) else None


class _TagScan:
    """Tell whether an end tag stands in a string of a value that is JSON: there it ends nothing.

    Behind a new line it does, which JSON has in no string, so that one left open ends somewhere.
    """

    def __init__(self) -> None:
        self._source = AnswerSource()
        self._reading = read_value(self._source, _ignore)
        self._opener = ""

    def is_in_string(self, text: str) -> bool:
        """Return whether the tag behind `text`, which follows the last such tag, is in a string."""
        self._opener = self._opener or text.lstrip()[:1]
        if self._opener not in ("{", "[", '"') or text.endswith("\n"):
            return False
        self._source.add(f"{text}</parameter>")
        return next(self._reading, True) is None


def string_parameters(tools: tuple[str, ...]) -> StringParameters:
    """Return which parameters of `tools` are strings; of a tool of another form, none."""
    found: dict[str, dict[str, bool]] = {}
    for tool in tools:
        function = _member(json.loads(tool), "function")
        properties = _member(_member(function, "parameters"), "properties")
        kinds = {key: _kinds_of(schema) for key, schema in properties.items()}
        found[str(function.get("name"))] = {
            key: "null" in own for key, own in kinds.items() if "string" in own <= _STRING_KINDS
        }
    return found


def is_name(text: str) -> bool:
    """Return whether calls may name a function or a parameter so."""
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def _kinds_of(schema: Any) -> set[str]:
    """Return the types of the values that a schema admits, "" for those that it does not tell."""
    match schema:
        case {"anyOf": [_, *_] as parts} | {"oneOf": [_, *_] as parts}:
            return {kind for part in parts for kind in _own_kinds_of(part)}
        case _:
            return _own_kinds_of(schema)


def _own_kinds_of(schema: Any) -> set[str]:
    match schema:
        case {"type": [*kinds]}:
            return set(map(str, kinds))
        case {"type": kind}:
            return {str(kind)}
        case {"enum": [*values]}:
            return {_KINDS.get(type(value), "") for value in values}
        case {"const": value}:
            return {_KINDS.get(type(value), "")}
        case _:
            return {""}


def _member(value: Any, key: str) -> dict[str, Any]:
    member = value.get(key) if isinstance(value, dict) else None
    return member if isinstance(member, dict) else {}


def _collect(source: AnswerSource, calls: CallCollector) -> Reading[bool]:
    """Read a value into the arguments of the call that has begun."""

    def emit(piece: str) -> None:
        calls.add(piece)
        source.forget()

    is_whole = yield from read_value(source, emit)
    if source.is_at_end and not is_whole:
        calls.add(source.take_back())  # cut off as the answer is
    return is_whole


def _as_json(text: str) -> Reading[str]:
    """Return `text` as JSON: the value that it writes, as JSON or Python do, else a string."""
    source, pieces = AnswerSource(), list[str]()
    source.add(text.strip())
    source.end()
    # What is neither may well begin like Python's strings and tuples.
    may_be_value = (yield from source.peek()) not in ("'", "(")
    if may_be_value and (yield from read_value(source, pieces.append)) and source.is_at_end:
        return "".join(pieces)
    return _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_unicode(text: str) -> bool:
    """Return whether `text` has no halves of characters, which escapes can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ignore(_: str) -> None:
    """Let go of a value that nobody reads."""
