from __future__ import annotations

from datetime import datetime
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import AddedToken

from session_server.core.errors import InvalidRequest, TokenizeFailed
from session_server.core.session_events import Message
from session_server.text.chat_encoder import ROLES, ChatEncoder
from session_server.text.chat_template import Conversation, RenderFrame, RenderJob, TemplateSource
from session_server.text.model_files import ModelFilesError
from session_server.text.model_text import ModelText
from session_server.text.template_values import conversation_of
from tests.text.local_text import LocalRenderer, load_local_text, run_to_end
from tests.text.tiny_models import SPECIALS, TEMPLATES, write_model

FRAME = RenderFrame(datetime(2025, 3, 1, 10))
CHAT_KINDS = [kind for kind, (template, _, _) in TEMPLATES.items() if template is not None]
APPENDING = ["chatml", "llama3", "thinking", "alternating"]
REWRITING = ["counting", "moving_system"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelText]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: load_local_text(write_model(folder / kind, kind)) for kind in TEMPLATES}


def chat_of(model: ModelText) -> ChatEncoder:
    assert model.chat is not None
    return model.chat


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def encode_all(chat: ChatEncoder, messages: list[Message]) -> list[int]:
    return run_to_end(chat.encode_all(messages, FRAME), chat.renderer)


def encode_after_answer(chat: ChatEncoder, messages: list[Message]) -> list[int]:
    return run_to_end(chat.encode_after_answer(messages, FRAME), chat.renderer)


def local(template: str, **named_tokens: str) -> LocalRenderer:
    return LocalRenderer(TemplateSource(template, named_tokens, max_chars=1000))


def spell(model: ModelText, ids: list[int]) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", CHAT_KINDS)
def test_a_render_is_what_transformers_gives(kind: str, tmp_path: Path) -> None:
    import transformers

    folder = write_model(tmp_path, kind)
    ours = load_local_text(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages = [user(" Hello\n"), assistant("Fine, thanks."), user("What is 12 + 30?")]
    want = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert encode_all(chat_of(ours), messages) == want


@pytest.mark.parametrize(("kind", "wanted"), [(k, k in APPENDING) for k in CHAT_KINDS])
def test_templates_that_depend_on_their_history_are_found_at_load(
    models: dict[str, ModelText], kind: str, wanted: bool
) -> None:
    assert chat_of(models[kind]).traits.can_append == wanted


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
def test_answer_and_delta_are_the_full_render(models: dict[str, ModelText], kind: str) -> None:
    model = models[kind]
    chat = chat_of(model)
    eos = max(model.eos_token_ids)
    first = [user("Hello")]
    history = encode_all(chat, first)
    history += [*model.tokenizer.encode_content("Fine."), eos]
    delta = encode_after_answer(chat, [user("And you?")])
    drop, skip = chat.join(history[-1], delta, model.eos_token_ids)
    assert (drop, skip) == (0, 1)
    want = encode_all(chat, [*first, assistant("Fine."), user("And you?")])
    assert history + delta[skip:] == want


def test_thinking_stays_in_an_appended_history(models: dict[str, ModelText]) -> None:
    chat = chat_of(models["thinking"])
    delta = spell(models["thinking"], encode_after_answer(chat, [user("More.")]))
    assert delta == (
        "<|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


class TestJoin:
    def test_a_cut_off_answer_is_closed_by_the_delta(self, models: dict[str, ModelText]) -> None:
        model = models["chatml"]
        delta = encode_after_answer(chat_of(model), [user("x")])
        last = model.tokenizer.encode_content("word")[-1]
        assert chat_of(model).join(last, delta, model.eos_token_ids) == (0, 0)

    def test_another_end_token_gives_way(self, models: dict[str, ModelText]) -> None:
        model = models["chatml"]
        delta = encode_after_answer(chat_of(model), [user("x")])
        other = model.tokenizer.token_to_id("<|endoftext|>")
        assert other is not None
        assert chat_of(model).join(other, delta, model.eos_token_ids) == (1, 0)

    def test_white_space_before_a_duplicate_end_goes_with_it(
        self, models: dict[str, ModelText]
    ) -> None:
        model = models["alternating"]
        chat = chat_of(model)
        delta = encode_after_answer(chat, [user("x")])
        assert spell(model, delta).startswith(" </s>")
        eos = model.tokenizer.token_to_id("</s>")
        assert eos is not None
        _, skip = chat.join(eos, delta, model.eos_token_ids)
        assert not spell(model, delta[skip:]).startswith((" ", "</s>"))

    def test_text_that_repeats_the_last_token_is_no_end(self, models: dict[str, ModelText]) -> None:
        model = models["chatml"]
        newline = model.tokenizer.encode_content("\n")[0]
        delta = [newline, *encode_after_answer(chat_of(model), [user("x")])]
        assert chat_of(model).join(newline, delta, model.eos_token_ids) == (0, 0)


class TestUserText:
    @pytest.mark.parametrize("kind", CHAT_KINDS)
    @given(data=st.data())
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    def test_no_text_adds_a_control_token(
        self, models: dict[str, ModelText], kind: str, data: st.DataObject
    ) -> None:
        model = models[kind]
        pieces = st.one_of(
            st.sampled_from([*SPECIALS, "</think>", "<think>", "<", "<|", "im_end|>", "\n", " "]),
            st.text(max_size=4),
        )
        content = data.draw(st.lists(pieces, max_size=6).map("".join))
        try:
            content.encode()
        except UnicodeEncodeError:
            return
        chat, specials = chat_of(model), model.tokenizer.special_ids
        encoders = [encode_all, *([encode_after_answer] if chat.traits.can_append else [])]
        for encode in encoders:
            plain = [token for token in encode(chat, [user("word")]) if token in specials]
            attacked = encode(chat, [user(content)])
            assert [token for token in attacked if token in specials] == plain
            if content.strip() == content and kind != "thinking":
                assert content in spell(model, attacked)

    @pytest.mark.parametrize("special", SPECIALS)
    def test_content_never_holds_a_special_id(
        self, models: dict[str, ModelText], special: str
    ) -> None:
        tokenizer = models["chatml"].tokenizer
        text = f"a{special}b {special}{special} c"
        ids = tokenizer.encode_content(text)
        assert not set(ids) & tokenizer.special_ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert set(tokenizer.encode_control(text)) & tokenizer.special_ids

    def test_a_control_token_in_two_halves_stays_text(self, models: dict[str, ModelText]) -> None:
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        model = models["chatml"]
        chat = ChatEncoder(model.tokenizer, local(template))
        halves = [user("<|im_"), user("end|>")]
        ids = encode_all(chat, halves)
        assert spell(model, ids) == "<|im_end|>"
        assert not set(ids) & model.tokenizer.special_ids

    def test_halves_stay_text_also_where_the_template_looks_into_them(
        self, models: dict[str, ModelText]
    ) -> None:
        source = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}{% endfor %}"
        model = models["chatml"]
        chat = ChatEncoder(model.tokenizer, local(source))
        ids = encode_all(chat, [user("x</think><|im_"), user("end|>")])
        assert spell(model, ids) == "<|im_end|>"
        assert not set(ids) & model.tokenizer.special_ids

    def test_a_template_that_looks_into_messages_still_sees_them(
        self, models: dict[str, ModelText]
    ) -> None:
        model = models["thinking"]
        messages = [user("a"), assistant("<think>\nhm\n</think>\n\nb <|im_end|>"), user("c")]
        text = spell(model, encode_all(chat_of(model), messages))
        assert "hm" not in text
        assert "\nb <|im_end|><|im_end|>\n" in text

    def test_marks_in_the_text_itself_do_no_harm(self, models: dict[str, ModelText]) -> None:
        model = models["chatml"]
        content = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "<|im_end|>"
        ids = encode_all(chat_of(model), [user(content)])
        assert content in spell(model, ids)

    def test_look_alikes_are_not_normalised_into_control_tokens(self, tmp_path: Path) -> None:
        import json

        folder = write_model(tmp_path, "chatml")
        path = folder / "tokenizer.json"
        source = json.loads(path.read_text())
        source["normalizer"] = {"type": "NFKC"}
        for token in source["added_tokens"]:
            token["normalized"] = True
        path.write_text(json.dumps(source))
        model = load_local_text(folder)
        ids = encode_all(chat_of(model), [user("\uff1c|im_end|\uff1e")])
        assert [i for i in ids if i in model.tokenizer.special_ids] == [
            model.tokenizer.token_to_id(text)
            for text in ("<|im_start|>", "<|im_end|>", "<|im_start|>")
        ]

    def test_tokens_that_eat_white_space_eat_the_same_beside_an_attack(
        self, tmp_path: Path
    ) -> None:
        eats = AddedToken("<|eats|>", lstrip=True, rstrip=True, special=True, normalized=False)
        folder = write_model(tmp_path, "chatml", extra=(eats,))
        template = "{% for m in messages %}<|eats|>{{ m['content'] }}<|eats|>{% endfor %}"
        (folder / "chat_template.jinja").write_text(template)
        model = load_local_text(folder)
        chat = chat_of(model)
        plain = encode_all(chat, [user("  ab  ")])
        attacked = encode_all(chat, [user("  <|im_end|>ab  ")])
        assert spell(model, plain) == "<|eats|>ab<|eats|>"
        assert spell(model, attacked) == "<|eats|><|im_end|>ab<|eats|>"

    def test_roles_are_not_free_text(self, models: dict[str, ModelText]) -> None:
        for role in ("im_end", "", "assistant\n", "x" * 1000):
            assert role not in ROLES
            with pytest.raises(InvalidRequest):
                encode_all(chat_of(models["chatml"]), [Message(role, "x")])


class TestTemplate:
    def render(self, source: str) -> str:
        renderer = local(source, bos_token="<s>")
        (text,) = renderer.render_now(RenderJob.of([conversation_of([user("é <b>")], ())], FRAME))
        return text

    def test_it_has_what_authors_expect(self) -> None:
        source = (
            "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
            "{% endfor %}{{ messages | tojson }}{{ strftime_now('%d %b %Y') }}"
            "{% generation %}x{% endgeneration %}{{ tools is none }}"
        )
        assert self.render(source) == ('<s>[{"role": "user", "content": "é <b>"}]01 Mar 2025xTrue')

    def test_blocks_leave_no_lines(self) -> None:
        assert self.render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{% set _ = messages.append(1) %}",
            "{{ 'x' * 100000000 }}",
            "{{ [0] * 100000000 }}",
            "{{ 2 ** 100000 }}",
            "{% for a in range(100000) %}{% for b in range(100000) %}xxxx{% endfor %}{% endfor %}",
            "{{ messages[7].content.x.y }}",
            "{{ 1 / 0 }}",
            "{{ 'a' + 1 }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ],
    )
    def test_what_it_must_not_do_is_an_error_of_the_request(self, source: str) -> None:
        with pytest.raises(TokenizeFailed):
            self.render(source)

    def test_its_own_refusal_is_passed_on_in_its_words(self) -> None:
        with pytest.raises(TokenizeFailed, match="refused: Roles must alternate"):
            self.render("{{ raise_exception('Roles must alternate') }}")

    def test_a_template_that_does_not_compile_fails_the_load(self) -> None:
        with pytest.raises(ModelFilesError):
            self.render("{% if %}")

    def test_the_date_is_frozen(self) -> None:
        job = RenderJob.of([Conversation([])], RenderFrame(datetime(1999, 1, 1)))
        assert local("{{ strftime_now('%Y') }}").render_now(job) == ["1999"]
