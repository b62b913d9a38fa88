"""The generated tables of the documentation: `python -m tests.docs.tables` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from session_server.config import Settings
from session_server.core.errors import INTERNAL_ERROR, WIRE_ERRORS
from session_server.flags import (
    FLAGS,
    IGNORED_SWITCHES,
    IGNORED_VALUES,
    default_text,
    range_text,
    switch_text,
)
from session_server.foreign_flags import RENAMED_FLAGS, UNSUPPORTED_FLAGS
from session_server.metrics.prometheus import ServerMetrics
from session_server.sources import variable_of
from tests.docs import import_graph, limits, protocol_tables, published
from tests.faults.programme import ELSEWHERE, EXPECTED, FEWER, NOT_YET, injections
from tests.mutants.at_access import CAUGHT
from tests.mutants.registry import MUTANTS, SURVIVORS
from tests.mutants.search import recorded
from tests.observe import dashboard
from tests.oracle import record
from tests.scenarios.catalogue import CATALOGUE, NOT_APPLICABLE
from tests.scenarios.registry import Scenario, scenarios

DOCS = published.DOCS
DASHBOARD = DOCS.parent / "examples/deploy/grafana-dashboard.json"


def error_table() -> str:
    """Every error a client can see."""

    def rows() -> Iterator[str]:
        yield "| code | HTTP | type | retry? | meaning |"
        yield "|---|---|---|---|---|"
        for error, form in sorted(WIRE_ERRORS.items(), key=lambda item: item[1].status):
            meaning = (error.__doc__ or "").strip().split("\n")[0]
            again = "yes" if form.retryable else "no"
            yield f"| `{form.code}` | {form.status} | `{form.kind}` | {again} | {meaning} |"
        form = INTERNAL_ERROR
        yield f"| `{form.code}` | {form.status} | `{form.kind}` | no | A bug of ours; no detail. |"

    return "\n".join(rows())


def flag_table() -> str:
    """Every setting of `session-server serve`, under its three names."""

    def rows() -> Iterator[str]:
        yield "| flag | key | variable | default | range | meaning |"
        yield "|---|---|---|---|---|---|"
        for flag in FLAGS:
            part = Settings.model_fields[flag.part].default
            field = type(part).model_fields[flag.field]
            names = ", ".join(f"`{name}`" for name in flag.names)
            default, limits = default_text(field), range_text(field)
            description = field.description or ""
            if flag.constant is not None:
                description = f"the flag: {switch_text(flag, description)}"
                if not isinstance(flag.constant, bool):
                    default = limits = ""  # those of the flag that takes a value
            shown = default and f"`{default}`"
            yield (
                f"| {names} | `{flag.part}.{flag.field}` | `{variable_of((flag.part, flag.field))}`"
                f" | {shown} | {limits} | {description} |"
            )
        ignored = ", ".join(f"`{name}`" for name in (*IGNORED_SWITCHES, *IGNORED_VALUES))
        yield ""
        yield f"Accepted and ignored: {ignored}."

    return "\n".join(rows())


def foreign_flag_table() -> str:
    """Flags of other servers: what they are called here, and why some are not here."""
    reasons: dict[str, list[str]] = {}
    for flag, reason in UNSUPPORTED_FLAGS.items():
        reasons.setdefault(reason, []).append(f"`{flag}`")

    def rows() -> Iterator[str]:
        yield "| flag | |"
        yield "|---|---|"
        for flag, ours in RENAMED_FLAGS.items():
            yield f"| `{flag}` | `{ours}` |"
        for reason, flags in reasons.items():
            yield f"| {', '.join(flags)} | not supported, because {reason} |"

    return "\n".join(rows())


def metric_table() -> str:
    """Every metric of a server, as it is scraped."""

    def rows() -> Iterator[str]:
        yield "| metric | kind | meaning |"
        yield "|---|---|---|"
        for metric in ServerMetrics(now_s=lambda: 0.0).registry.collect():
            if not metric.name.startswith("session_server_"):
                continue  # of the process: what the library tells of it depends on the system
            name = metric.name + ("_total" if metric.type == "counter" else "")
            yield f"| `{name}` | {metric.type} | {metric.documentation} |"

    return "\n".join(rows())


def fault_table() -> str:
    """Every fault of the programme: what is expected, where it strikes, how often at least."""

    def rows() -> Iterator[str]:
        yield "| fault | expected | where it strikes | points |"
        yield "|---|---|---|---|"
        for fault, tests in injections().items():
            where = "; ".join(test.where for test in tests)
            points = f"{sum(test.points for test in tests):,}"
            yield f"| {fault} | {EXPECTED[fault]} | {where} | {points} |"
        yield ""
        for fault, why in FEWER.items():
            yield f"* Fewer points, {fault}: {why}."
        for fault, where in ELSEWHERE.items():
            yield f"* Elsewhere, {fault}: {where}."
        for fault, why in NOT_YET.items():
            yield f"* Not yet, {fault}: {why}."

    return "\n".join(rows())


def scenario_table() -> str:
    """Every bug of the catalogue: its stories, and what is taken away to make each of them fail."""
    stories: dict[str, list[Scenario]] = {}
    for found in scenarios():
        stories.setdefault(found.id, []).append(found)

    def rows() -> Iterator[str]:
        yield "| | what went wrong elsewhere | what is shown here | and fails when |"
        yield "|---|---|---|---|"
        for name, bug in CATALOGUE.items():
            if name in stories:
                shown = "<br>".join(found.claim for found in stories[name])
                guards = dict.fromkeys(g.bug for found in stories[name] for g in found.guards)
                yield f"| {name} | {bug} | {shown} | {'<br>'.join(guards)} |"
        yield ""
        for name, why in NOT_APPLICABLE.items():
            yield f"* {name}, {CATALOGUE[name]}: {why}."

    return "\n".join(rows())


def mutant_table() -> str:
    """Every seeded bug, and where the simulator found it."""
    found = recorded()

    def rows() -> Iterator[str]:
        yield "| bug | source | found by | steps |"
        yield "|---|---|---|---|"
        for name, mutant in MUTANTS.items():
            where = f"{found[name].layer} | {found[name].steps:,}" if name in found else "— | "
            yield f"| {mutant.bug} | {mutant.source} | {where} |"
        yield ""
        num_found = sum(name in found for name in MUTANTS)
        yield f"{num_found} of {len(MUTANTS)} are found."
        for name, why in SURVIVORS.items():
            yield f"* {MUTANTS[name].bug} {why}"

    return "\n".join(rows())


def access_mutant_table() -> str:
    """Every seeded bug of keys and quotas, and the test that finds it."""

    def rows() -> Iterator[str]:
        yield "| bug | found by |"
        yield "|---|---|"
        for caught in CAUGHT:
            module, _, test = caught.by.partition(":")
            yield f"| {caught.mutant.bug} | `{module.replace('.', '/')}.py`: `{test}` |"

    return "\n".join(rows())


def error_of_families_table() -> str:
    """Every family, and its largest difference from `transformers`."""

    def rows() -> Iterator[str]:
        yield "| family | largest difference of a logit |"
        yield "|---|---|"
        for family, error in record.recorded().items():
            yield f"| `{family}` | {error:.1e} |"

    return "\n".join(rows())


def evidence_list() -> str:
    """What the README counts: seeded bugs, scenarios, faults."""
    found = recorded()
    steps = sorted(found[name].steps for name in MUTANTS if name in found)
    told = {story.id for story in scenarios()}
    points = sum(test.points for tests in injections().values() for test in tests)

    def rows() -> Iterator[str]:
        yield (
            f"* **{len(MUTANTS)} seeded bugs**, those that other servers have had among them, are "
            f"put in one at a time: the\n  simulator finds {len(steps)}, half of them within "
            f"{steps[len(steps) // 2]:,} steps.\n  {len(CAUGHT)} more, of keys and quotas, are "
            "found by tests that they name."
        )
        yield (
            f"* **[{len(CATALOGUE)} scenarios](docs/scenarios.md)** from this field's history: "
            f"{len(told)} are stories by name, each shown to fail\n  when its guard is taken out; "
            f"{len(NOT_APPLICABLE)} do not apply yet, and say why."
        )
        yield (
            f"* **{points // 100 * 100:,} faults** and more strike at chosen points, one at a "
            "time: nobody waits, no token\n  and no page is lost."
        )

    return "\n".join(rows())


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("../README.md", "evidence"): evidence_list,
    ("architecture.md", "imports"): import_graph.graph_block,
    ("limits.md", "settings"): limits.setting_table,
    ("limits.md", "fields"): limits.field_table,
    ("limits.md", "constants"): limits.constant_table,
    ("models.md", "worst"): error_of_families_table,
    ("protocol.md", "errors"): error_table,
    ("openai.md", "chat"): protocol_tables.chat_table,
    ("openai.md", "completion"): protocol_tables.completion_table,
    ("responses.md", "responses"): protocol_tables.response_table,
    ("responses.md", "compaction"): protocol_tables.compaction_table,
    ("realtime.md", "realtime"): protocol_tables.realtime_table,
    ("responses.md", "socket"): protocol_tables.response_frame_table,
    ("protocol.md", "frames"): protocol_tables.frame_table,
    ("protocol.md", "message"): protocol_tables.message_table,
    ("protocol.md", "objects"): protocol_tables.object_table,
    ("protocol.md", "sampling"): protocol_tables.sampling_table,
    ("protocol.md", "session"): protocol_tables.session_table,
    ("protocol.md", "turn"): protocol_tables.turn_table,
    ("runbook.md", "flags"): flag_table,
    ("runbook.md", "foreign"): foreign_flag_table,
    ("runbook.md", "metrics"): metric_table,
    ("scenarios.md", "scenarios"): scenario_table,
    ("testing.md", "faults"): fault_table,
    ("testing.md", "mutants"): mutant_table,
    ("testing.md", "access mutants"): access_mutant_table,
}


def with_table(text: str, name: str, table: str) -> str:
    """`text` with what stands between the marks of `name` replaced."""
    block = re.compile(rf"(<!-- {name}: generated[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
    assert block.search(text), f"no marks for {name}"
    return block.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)


def main() -> None:
    """Write every table into its page."""
    for (page, name), table in TABLES.items():
        path = DOCS / page
        path.write_text(with_table(path.read_text("utf-8"), name, table()), "utf-8")
    DASHBOARD.write_text(dashboard.text(), "utf-8")
    for path, text in published.files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
