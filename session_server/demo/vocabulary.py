"""List the words of which the demo dialogues are made.

Every key ends in a noun of its own, so that one word decides what is asked; the pools of
keys and values do not overlap where a word could be mistaken for the other role.
"""

from typing import Final


def split(text: str) -> tuple[str, ...]:
    """Return the words of a text, so that a list of words reads as one."""
    return tuple(text.split())


COLOURS: Final = split(
    "red blue green teal amber violet silver black white orange crimson ivory olive maroon"
)
NAMES: Final = split(
    "Anna Ben Clara David Elena Frank Greta Hugo Ingrid Jonas Karin Leo Maria Nils Olga Paul "
    "Rosa Simon Tara Viktor Wanda Yusuf Zoe Ahmed"
)
CITIES: Final = split(
    "Oslo Paris Rome Vienna Lisbon Madrid Berlin Prague Dublin Athens Cairo Lima Tokyo Boston "
    "Geneva Zurich Helsinki Warsaw Sydney Quito"
)
FOODS: Final = split(
    "pizza soup rice pasta curry salad bread cheese noodles pancakes sushi stew risotto tacos"
)
DRINKS: Final = split("tea coffee water juice milk cocoa lemonade cider espresso cola")
ANIMALS: Final = split(
    "cat dog fox owl otter horse rabbit tiger panda whale eagle badger dolphin hedgehog"
)
JOBS: Final = split(
    "baker teacher doctor farmer pilot nurse painter lawyer plumber tailor writer engineer "
    "gardener carpenter"
)
HOBBIES: Final = split(
    "chess hiking sailing painting running cycling fishing knitting climbing reading dancing "
    "skiing cooking swimming"
)
FRUITS: Final = split("apple pear plum cherry mango banana grape lemon peach melon fig kiwi")
TREES: Final = split("oak pine birch maple willow cedar ash elm beech spruce")
METALS: Final = split("iron copper gold zinc tin nickel brass bronze steel lead")
MONTHS: Final = split(
    "January February March April May June July August September October November December"
)
DAYS: Final = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SEASONS: Final = split("spring summer autumn winter")
INSTRUMENTS: Final = split("piano violin guitar flute drum cello harp trumpet banjo oboe")
SUBJECTS: Final = split("history physics biology music geometry poetry geography chemistry logic")
PLANETS: Final = split("Mercury Venus Mars Jupiter Saturn Uranus Neptune Pluto")

# What follows "my": the key, and the pool its values come from.
ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "name": NAMES,
    "city": CITIES,
    "job": JOBS,
    "hobby": HOBBIES,
    "favourite colour": COLOURS,
    "favourite food": FOODS,
    "favourite drink": DRINKS,
    "favourite animal": ANIMALS,
    "favourite fruit": FRUITS,
    "favourite tree": TREES,
    "favourite metal": METALS,
    "favourite season": SEASONS,
    "favourite instrument": INSTRUMENTS,
    "favourite subject": SUBJECTS,
    "favourite planet": PLANETS,
    "birth month": MONTHS,
    "lucky day": DAYS,
    "brother": NAMES,
    "sister": NAMES,
    "neighbour": NAMES,
    "coach": NAMES,
    "puppy": NAMES,
    "boss": NAMES,
    "home town": CITIES,
    "next trip": CITIES,
    "breakfast": FOODS,
    "dinner": FOODS,
    "car": COLOURS,
    "jacket": COLOURS,
    "bicycle": COLOURS,
    "door": COLOURS,
    "pet": ANIMALS,
    "costume": ANIMALS,
    "dessert": FRUITS,
    "ring": METALS,
    "table": TREES,
    "holiday": MONTHS,
    "day off": DAYS,
    "password": (),
    "nickname": (),
    "team": (),
    "project": (),
    "street": (),
    "school": (),
}

# Who likes what.
FRIENDS: Final = split(
    "Alice Bob Carol Dan Eve Felix Gina Henry Iris Jack Kate Liam Mona Nora Oscar Petra Quinn "
    "Ralph Sofia Tom Ursula Vera Will Xenia Yara Zack"
)
LIKES: Final = FOODS + DRINKS + HOBBIES + FRUITS

# What has a code of three digits.
DOORS: Final = split(
    "garage office cellar gate locker vault studio library museum hotel bank tower lab depot"
)

# What lies where.
THINGS: Final = split(
    "lamp key book phone wallet map umbrella camera ticket hammer basket blanket clock mirror "
    "candle ladder bottle scarf helmet kettle pencil letter parcel suitcase"
)
PLACES: Final = split(
    "kitchen bedroom attic hall garden shed drawer cupboard fridge bag box van desk shelf"
)

PLAIN: Final = split(
    "river stone cloud window paper forest bridge island valley button ocean feather lantern "
    "mountain pebble meadow harbour anchor"
)
