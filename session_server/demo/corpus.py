"""Generate dialogues in which later turns ask for what earlier turns told.

Every answer is a function of the turns before it, so a session that mixes up, loses or
leaks history gives answers that are wrong in a way a string comparison finds. The module
needs neither torch nor a tokenizer: the demo, the load test and the training of the model
(`examples/train_embedded_model`) all use it.

A fact is told, acknowledged by its echo, and may be asked for at any later turn::

    user       My city is Oslo.          The garage code is 482.    Bob likes tea.
    assistant  Noted. Your city is Oslo. Noted. The garage ...      Noted. Bob likes tea.
    user       What is my city?          What is the garage code?   What does Bob like?
    assistant  Your city is Oslo.        The garage code is 482.    Bob likes tea.

The key words of telling, echo and answer are the same on purpose: recall is then what an
induction head does (Olsson et al. 2022), which is what a model of this size can learn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, NamedTuple

from session_server.demo import vocabulary as words

Kind = Literal["tell", "ask", "other"]

FIRST_TRAINING_SEED: Final = 1 << 32
"""Training draws its seeds from here upwards; `dialogue` accepts only seeds below. What a test
measures was therefore never trained on."""

REFUSAL: Final = "Sorry, I can only remember what you tell me."

_CONSONANTS: Final = "bdfgklmnprstvz"
_VOWELS: Final = "aeiou"


class Exchange(NamedTuple):
    """Hold one user turn and its only right answer."""

    user: str
    assistant: str
    kind: Kind


@dataclass(frozen=True)
class Dialogue:
    """Hold the turns of one session, in order."""

    turns: tuple[Exchange, ...]


@dataclass(frozen=True)
class Mixture:
    """Weight what a user turn does; the rest beside `tell` and `ask` is small talk.

    Attributes:
        tell: turns that tell a fact.
        ask: turns that ask for a fact.
        overwrite: told facts that replace an earlier one; the last one told counts.
        unknown: questions about something never told.
        pseudo_word: values that are invented words.
        pseudo_key: told attributes whose key is an invented word.
    """

    tell: float = 0.38
    ask: float = 0.42
    overwrite: float = 0.05
    unknown: float = 0.1
    pseudo_word: float = 0.15
    pseudo_key: float = 0.0


STANDARD: Final = Mixture()


class _Fact(NamedTuple):
    """Hold a kind of fact in its three sentences: `{}` stands for the value."""

    telling: str
    answer: str
    question: str
    absence: str
    values: tuple[str, ...]


def dialogue(seed: int, num_turns: int) -> Dialogue:
    """Generate the dialogue of a seed.

    A dialogue of more turns begins with the dialogue of fewer turns.

    Raises:
        ValueError: the seed is reserved for training, or there are no turns to make.
    """
    require_evaluation_seed(seed)
    if num_turns < 1:
        raise ValueError(f"num_turns must be at least 1, got {num_turns}")
    turns = exchanges(Random(seed))
    return Dialogue(tuple(next(turns) for _ in range(num_turns)))


def require_evaluation_seed(seed: int) -> None:
    """Reject a seed that training may draw.

    Raises:
        ValueError: the seed is reserved for training.
    """
    if not 0 <= seed < FIRST_TRAINING_SEED:
        raise ValueError(f"seed must be in [0, {FIRST_TRAINING_SEED}), got {seed}")


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer is the expected one, up to white space around it."""
    return answer.strip() == expected.strip()


def exchanges(random: Random, mixture: Mixture = STANDARD) -> Iterator[Exchange]:
    """Yield exchanges without end."""
    speaker = Speaker(random, mixture)
    while True:
        yield speaker.exchange()


class Speaker:
    """Simulate a user who remembers what it told, and therefore knows every right answer."""

    def __init__(self, random: Random, mixture: Mixture = STANDARD) -> None:
        self._random = random
        self._mixture = mixture
        self._told: dict[_Fact, str] = {}
        self._last: Exchange | None = None

    def exchange(self) -> Exchange:
        """Return the next turn."""
        draw = self._random.random()
        if draw < self._mixture.tell:
            made = self.tell()
        elif draw < self._mixture.tell + self._mixture.ask:
            made = self.ask()
        else:
            made = self._small_talk()
        self._last = made
        return made

    def tell(self) -> Exchange:
        """Tell a new fact, or sometimes a new value for an old one."""
        random = self._random
        is_overwrite = self._told and random.random() < self._mixture.overwrite
        fact = random.choice(list(self._told)) if is_overwrite else self._untold()
        value = self._value(fact)
        self._told[fact] = value
        told = _vary(random, "Remember this: ", fact.telling.format(value))
        self._last = Exchange(told, f"Noted. {fact.answer.format(value)}", "tell")
        return self._last

    def ask(self) -> Exchange:
        """Ask for a fact, possibly one that was never told."""
        is_unknown = not self._told or self._random.random() < self._mixture.unknown
        fact = self._untold()
        if not is_unknown or fact in self._told:
            return self.ask_known()
        return Exchange(_vary(self._random, "Tell me: ", fact.question), fact.absence, "ask")

    def ask_known(self) -> Exchange:
        """Ask for one of the facts told; there must be at least one."""
        fact, value = self._random.choice(list(self._told.items()))
        question = _vary(self._random, "Tell me: ", fact.question)
        return Exchange(question, fact.answer.format(value), "ask")

    def _small_talk(self) -> Exchange:
        random = self._random
        draw = random.random()
        if draw < 0.3:
            return Exchange(strange_text(random), REFUSAL, "other")
        if draw < 0.5:
            return _counting(random)
        if draw < 0.7:
            said = " ".join(random.choice(words.PLAIN) for _ in range(random.randint(1, 4)))
            return Exchange(f"Repeat: {said}", said, "other")
        if draw < 0.8 and self._last is not None and self._last.kind != "other":
            return Exchange("What did I just say?", f"You said: {self._last.user}", "other")
        user, assistant = random.choice(_COURTESIES)
        return Exchange(user, assistant, "other")

    def _untold(self) -> _Fact:
        """Return a fact not told yet, or one already told if hardly any are left."""
        random = self._random
        if random.random() < self._mixture.pseudo_key:
            return _fact(_ATTRIBUTE, pseudo_word(random).lower(), ())
        for _ in range(17):
            fact = random.choice(random.choice(_FACTS))
            if fact not in self._told:
                break
        return fact

    def _value(self, fact: _Fact) -> str:
        random = self._random
        if fact in _CODES:
            return "".join(random.choice("0123456789") for _ in range(3))
        if fact in _PLACED or (fact.values and random.random() >= self._mixture.pseudo_word):
            return random.choice(fact.values)
        return pseudo_word(random)


def pseudo_word(random: Random) -> str:
    """Return an invented word of two or three syllables, capitalized half of the time."""
    num_syllables = 2 if random.random() < 0.8 else 3
    word = "".join(
        random.choice(_CONSONANTS) + random.choice(_VOWELS) for _ in range(num_syllables)
    )
    if random.random() < 0.3:
        word += random.choice(_CONSONANTS)
    return word.capitalize() if random.random() < 0.5 else word


def strange_text(random: Random) -> str:
    """Return text that the model must answer with a refusal."""
    draw = random.random()
    if draw < 0.6:
        return random.choice(_OPENINGS) + " " + _topic(random) + random.choice("..??!")
    if draw < 0.8:
        return " ".join(pseudo_word(random) for _ in range(random.randint(1, 6)))
    if draw < 0.9:
        return "".join(chr(random.randint(33, 126)) for _ in range(random.randint(3, 20)))
    return "".join(chr(random.randint(0xA1, 0x30FF)) for _ in range(random.randint(2, 8)))


def _topic(random: Random) -> str:
    pool = random.choice(_TOPIC_POOLS)
    topic = random.choice(pool)
    if random.random() < 0.6:
        topic = f"{random.choice(_TOPIC_OPENINGS)} {topic}"
    if random.random() < 0.4:
        other_topic = random.choice(random.choice(_TOPIC_POOLS))
        topic = f"{topic} {random.choice(_TOPIC_LINKS)} {other_topic}"
    return topic


def _vary(random: Random, opening: str, sentence: str) -> str:
    """Sometimes add an opening, or drop the punctuation at the end."""
    draw = random.random()
    if draw < 0.08:
        return opening + sentence
    if draw < 0.16:
        return sentence[:-1]
    return sentence


def _counting(random: Random) -> Exchange:
    start = random.choice((1, 1, 1, random.randint(0, 30)))
    end = start + random.randint(2, 15 if start == 1 else 9)
    counted = " ".join(str(number) for number in range(start, end + 1))
    return Exchange(f"Count from {start} to {end}.", counted, "other")


def _fact(sentences: tuple[str, str, str, str], name: str, values: tuple[str, ...]) -> _Fact:
    telling, answer, question, absence = (sentence.format(name) for sentence in sentences)
    return _Fact(telling, answer, question, f"You have not told me {absence}.", values)


# Telling, answer, question, and what has not been told.
_ATTRIBUTE: Final = ("My {} is {{}}.", "Your {} is {{}}.", "What is my {}?", "your {}")
_LIKING: Final = ("{} likes {{}}.", "{} likes {{}}.", "What does {} like?", "what {} likes")
_CODE: Final = ("The {} code is {{}}.",) * 2 + ("What is the {} code?", "the {} code")
_PLACE: Final = ("The {} is in the {{}}.",) * 2 + ("Where is the {}?", "where the {} is")

_ATTRIBUTES: Final = tuple(_fact(_ATTRIBUTE, *each) for each in words.ATTRIBUTES.items())
_LIKINGS: Final = tuple(_fact(_LIKING, friend, words.LIKES) for friend in words.FRIENDS)
_CODES: Final = tuple(_fact(_CODE, door, ()) for door in words.DOORS)
_PLACED: Final = tuple(_fact(_PLACE, thing, words.PLACES) for thing in words.THINGS)

# A group is drawn first, then a fact in it; attributes count twice.
_FACTS: Final = (_ATTRIBUTES, _ATTRIBUTES, _LIKINGS, _CODES, _PLACED)

_COURTESIES: Final = (
    ("Hello!", "Hello! Tell me something to remember."),
    ("Hello", "Hello! Tell me something to remember."),
    ("Hi", "Hello! Tell me something to remember."),
    ("Good morning.", "Good morning!"),
    ("Good evening.", "Good evening!"),
    ("How are you?", "I am well, thank you."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Who are you?", "I am a very small model with a good memory."),
    ("What can you do?", "I remember what you tell me in this session."),
    ("Goodbye.", "Goodbye!"),
    ("Bye", "Goodbye!"),
)

_OPENINGS: Final = (
    "Explain", "Why is", "Who invented", "How does", "Write a poem about", "Tell me about",
    "Translate", "What is the capital of", "Who was", "When was", "How many", "Can you",
    "Please describe", "Summarise", "Write code for", "Do you like", "I think", "What about",
    "Give me a list of", "Where can I buy", "What is the meaning of", "Compare", "Solve",
    "What is", "Who is", "Which", "How do I", "Is there", "Are there", "Would you", "Where are",
    "Sing", "Calculate", "Tell me a joke about", "What do you know about", "We saw", "They have",
)  # fmt: skip
_TOPIC_OPENINGS: Final = words.split(
    "the a some many every old new big small most that this our their all your"
)
_TOPIC_LINKS: Final = words.split("and or in with for of like near from before without about")
_TOPICS: Final = words.split(
    "weather sky world war music computer program language science history moon sun earth "
    "president king queen country people love time money food sport football film story joke "
    "recipe number sum equation universe brain heart life death law market internet game train "
    "plane ship house road bird fish tree flower sea rain snow wind fire light speed energy atom "
    "essay letter sentence paragraph function python list sort France Germany Italy Spain China "
    "India America Africa England Japan Einstein Newton Shakespeare Mozart Napoleon 2 7 12 100 "
    "today tomorrow yesterday machine model work health sleep dream child friend family bread"
)
_TOPIC_POOLS: Final = (_TOPICS, _TOPICS, words.PLAIN, words.ANIMALS, words.CITIES, words.FOODS)
