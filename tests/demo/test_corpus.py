"""The corpus: deterministic, consistent with itself, and disjoint from what was trained on."""

from random import Random

import pytest

from session_server.demo import corpus, vocabulary


def test_a_seed_determines_its_dialogue() -> None:
    assert corpus.dialogue(7, 30) == corpus.dialogue(7, 30)
    assert corpus.dialogue(7, 30) != corpus.dialogue(8, 30)


def test_a_longer_dialogue_begins_with_the_shorter_one() -> None:
    assert corpus.dialogue(7, 40).turns[:10] == corpus.dialogue(7, 10).turns


def test_the_text_of_a_seed_stays_as_it_is() -> None:
    assert corpus.dialogue(1, 3).turns == (
        ("My lucky day is noveb.", "Noted. Your lucky day is noveb.", "tell"),
        ("What is my lucky day?", "Your lucky day is noveb.", "ask"),
        ("The lamp is in the drawer.", "Noted. The lamp is in the drawer.", "tell"),
    )


@pytest.mark.parametrize("seed", [-1, corpus.FIRST_TRAINING_SEED])
def test_seeds_outside_evaluation_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be in"):
        corpus.dialogue(seed, 3)


def test_a_dialogue_without_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="num_turns"):
        corpus.dialogue(1, 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_to_a_question_is_the_last_thing_told_about_it(seed: int) -> None:
    last_said: dict[str, str] = {}
    for exchange in corpus.dialogue(seed, 120).turns:
        if exchange.kind == "tell":
            said = exchange.assistant.removeprefix("Noted. ")
            last_said[key_of(said)] = said
        if exchange.kind == "ask":
            if exchange.assistant.startswith("You have not told me"):
                assert not any(key in exchange.assistant for key in last_said)
            else:
                assert last_said[key_of(exchange.assistant)] == exchange.assistant


def key_of(sentence: str) -> str:
    """What a fact is about: 'Your car is red.' -> 'your car', 'Bob likes tea.' -> 'Bob likes'."""
    key = sentence.rpartition(" is ")[0] or sentence.partition(" likes ")[0] + " likes"
    return key.removesuffix(" in the").replace("Your ", "your ").replace("The ", "the ")


def test_dialogues_tell_ask_and_do_other_things() -> None:
    kinds = [e.kind for seed in range(40) for e in corpus.dialogue(seed, 40).turns]
    assert kinds.count("tell") > 0.3 * len(kinds)
    assert kinds.count("ask") > 0.35 * len(kinds)
    assert kinds.count("other") > 0.1 * len(kinds)


def test_an_answer_is_right_up_to_white_space_around_it() -> None:
    assert corpus.is_right(" Your city is Oslo.\n", "Your city is Oslo.")
    assert not corpus.is_right("Your city is Rome.", "Your city is Oslo.")
    assert not corpus.is_right("Your city is Oslo. Yes.", "Your city is Oslo.")


def test_answers_are_short() -> None:
    answers = [e.assistant for seed in range(40) for e in corpus.dialogue(seed, 40).turns]
    assert max(map(len, answers)) <= 80


def test_names_of_friends_are_nobody_elses() -> None:
    assert not set(vocabulary.FRIENDS) & set(vocabulary.NAMES)


def test_no_key_ends_in_the_noun_of_another() -> None:
    nouns = [key.split()[-1] for key in vocabulary.ATTRIBUTES]
    nouns += [*vocabulary.DOORS, *vocabulary.THINGS, *vocabulary.FRIENDS]
    assert len(set(nouns)) == len(nouns)


def test_strange_text_asks_for_no_fact() -> None:
    random = Random(3)
    texts = [corpus.strange_text(random) for _ in range(2000)]
    assert not any(text.startswith(("What is my", "Remember this:", "Repeat:")) for text in texts)
