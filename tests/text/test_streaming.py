from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import decoders, models
from tokenizers.decoders import DecodeStream

from session_server.text import detokenizer
from session_server.text.detokenizer import MAX_HELD_TOKENS, Detokenizer
from session_server.text.stops import StopMatcher
from session_server.text.tokenizer import Tokenizer
from tests.text.tiny_models import write_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_model(tmp_path_factory.mktemp("model"), "chatml")
    return Tokenizer(folder / "tokenizer.json")


def stream(tokenizer: Tokenizer, ids: Iterable[int], *, skip: bool = True) -> list[str]:
    each = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(each.feed(token) for token in ids), each.flush()]


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes the way SentencePiece models have them: a run of them is text, or all U+FFFD."""
    names = [f"<0x{value:02X}>" for value in range(256)] + ["a", "b", "\u2581"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return Tokenizer(path)


class TestDetokenizer:
    def test_an_invalid_byte_behind_given_text_does_not_end_the_answer(
        self, byte_fallback: Tokenizer
    ) -> None:
        """vllm#17448: the decoder takes back what it gave, and `DecodeStream` raises."""
        letter = byte_fallback.encode_content("é")
        ids = [*letter, 0xFF, *byte_fallback.encode_content("ab")]
        assert byte_fallback.decode(ids) == "\ufffd\ufffd\ufffdab"
        assert "".join(stream(byte_fallback, ids)) == "é\ufffdab"

    @given(ids=st.lists(st.sampled_from([0xC3, 0xA9, 0xFF, 0x41, 256, 257, 258]), max_size=30))
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_bytes_in_any_order_give_text(self, byte_fallback: Tokenizer, ids: list[int]) -> None:
        whole = byte_fallback.decode(ids)
        joined = "".join(stream(byte_fallback, ids))
        assert joined.count("a") == ids.count(256)
        assert joined.count("b") == ids.count(257)
        if "\ufffd" not in whole:
            assert joined == whole

    @given(text=st.text(max_size=30))
    @settings(max_examples=200, deadline=None, derandomize=True)
    def test_pieces_joined_are_the_text(self, tokenizer: Tokenizer, text: str) -> None:
        pieces = stream(tokenizer, tokenizer.encode_content(text))
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)

    @given(data=st.data())
    @settings(max_examples=200, deadline=None, derandomize=True)
    def test_any_ids_give_what_decoding_them_at_once_gives(
        self, tokenizer: Tokenizer, data: st.DataObject
    ) -> None:
        token = st.integers(0, max(tokenizer.vocabulary.values()))
        ids = data.draw(st.lists(token, max_size=20))
        skip = data.draw(st.booleans())
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        joined = "".join(stream(tokenizer, ids, skip=skip))
        assert joined.replace("\ufffd", "") == whole.replace("\ufffd", "")
        if "\ufffd" not in whole:
            assert joined == whole

    def test_a_character_comes_when_it_is_whole(self, tokenizer: Tokenizer) -> None:
        ids = [tokenizer.encode_content("🦊")]
        pieces = stream(tokenizer, ids[0])
        assert len(ids[0]) > 1
        assert [piece for piece in pieces if piece] == ["🦊"]

    def test_what_never_becomes_a_character_is_flushed(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode_content("🦊")[:-1]
        pieces = stream(tokenizer, ids)
        assert set(pieces[:-1]) == {""}
        assert set(pieces[-1]) == {"\ufffd"}

    def test_what_is_held_is_bounded(self, tokenizer: Tokenizer) -> None:
        broken = tokenizer.encode_content("🦊")[-1]
        held = Detokenizer(tokenizer)
        pieces = [held.feed(broken) for _ in range(MAX_HELD_TOKENS * 3)]
        assert sum(map(bool, pieces)) == 3

    def test_skipped_control_tokens_cost_nothing_however_many_come(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stepped: list[int] = []

        class Counted:
            def __init__(self, *, skip_special_tokens: bool) -> None:
                self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

            def step(self, backend: tokenizers.Tokenizer, token_id: int) -> str | None:
                stepped.append(token_id)
                return self._stream.step(backend, token_id)

        monkeypatch.setattr(detokenizer, "DecodeStream", Counted)
        fox = tokenizer.encode_content("🦊")
        control = [min(tokenizer.special_ids)] * 100
        assert "".join(stream(tokenizer, [*fox[:1], *control, *fox[1:], *control])) == "🦊"
        assert stepped == fox

    def test_control_tokens_are_silent_unless_asked_for(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode_control("a<|im_end|>b")
        assert "".join(stream(tokenizer, ids)) == "ab"
        assert "".join(stream(tokenizer, ids, skip=False)) == "a<|im_end|>b"

    def test_ids_of_a_padded_vocabulary_are_silent(self, tokenizer: Tokenizer) -> None:
        ids = [*tokenizer.encode_content("a"), max(tokenizer.vocabulary.values()) + 6]
        assert "".join(stream(tokenizer, [*ids, *ids])) == "aa"


def match(pieces: Iterable[str], stops: list[str], *, keep: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, keep_stop=keep)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


def reference(text: str, stops: list[str], *, keep: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


class TestStops:
    @given(
        pieces=st.lists(st.text("abc", max_size=4), max_size=8),
        stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
        keep=st.booleans(),
    )
    @settings(max_examples=200, deadline=None, derandomize=True)
    def test_the_cut_does_not_depend_on_the_pieces(
        self, pieces: list[str], stops: list[str], keep: bool
    ) -> None:
        assert match(pieces, stops, keep=keep) == reference("".join(pieces), stops, keep=keep)

    @given(
        text=st.text("ab", max_size=12),
        stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    )
    @settings(max_examples=150, deadline=None, derandomize=True)
    def test_no_more_is_held_back_than_could_still_match(self, text: str, stops: list[str]) -> None:
        matcher = StopMatcher(stops)
        given_out = "".join(map(matcher.feed, text))
        if matcher.matched is None:
            held = text[len(given_out) :]
            assert not held or any(stop.startswith(held) for stop in stops)

    @pytest.mark.parametrize(
        ("pieces", "stops", "wanted"),
        [
            (["a", "b", "c"], ["ab"], ("", "ab")),
            (["xab"], ["b", "ab"], ("x", "ab")),
            (["xab"], ["ab", "b"], ("x", "ab")),
            (["abcd"], ["abcd", "bc"], ("a", "bc")),
            (["ab", "ac"], ["abab", "bac"], ("a", "bac")),
            (["xa"], ["ab"], ("xa", None)),
        ],
    )
    def test_the_first_to_be_complete_wins_and_then_the_longest(
        self, pieces: list[str], stops: list[str], wanted: tuple[str, str | None]
    ) -> None:
        assert match(pieces, stops) == wanted

    def test_nothing_follows_a_match(self) -> None:
        matcher = StopMatcher(["b"])
        assert [matcher.feed("ab"), matcher.feed("c"), matcher.flush()] == ["a", "", ""]
