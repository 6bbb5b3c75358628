"""Names of classes as people say them: mini-ImageNet has numbers of WordNet, CUB names of folders."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TABLE = """
01532829 house finch; 01558993 robin; 01704323 triceratops; 01749939 green mamba;
01770081 harvestman; 01843383 toucan; 01855672 goose; 01910747 jellyfish; 01930112 nematode;
01981276 king crab; 02074367 dugong; 02089867 Walker hound; 02091244 Ibizan hound; 02091831 Saluki;
02099601 golden retriever; 02101006 Gordon setter; 02105505 komondor; 02108089 boxer;
02108551 Tibetan mastiff; 02108915 French bulldog; 02110063 malamute; 02110341 dalmatian;
02111277 Newfoundland; 02113712 miniature poodle; 02114548 white wolf;
02116738 African hunting dog; 02120079 Arctic fox; 02129165 lion; 02138441 meerkat;
02165456 ladybug; 02174001 rhinoceros beetle; 02219486 ant; 02443484 black-footed ferret;
02457408 three-toed sloth; 02606052 rock beauty; 02687172 aircraft carrier; 02747177 ashcan;
02795169 barrel; 02823428 beer bottle; 02871525 bookshop; 02950826 cannon; 02966193 carousel;
02971356 carton; 02981792 catamaran; 03017168 chime; 03047690 clog; 03062245 cocktail shaker;
03075370 combination lock; 03127925 crate; 03146219 cuirass; 03207743 dishrag; 03220513 dome;
03272010 electric guitar; 03337140 file; 03347037 fire screen; 03400231 frying pan;
03417042 garbage truck; 03476684 hair slide; 03527444 holster; 03535780 horizontal bar;
03544143 hourglass; 03584254 iPod; 03676483 lipstick; 03770439 miniskirt; 03773504 missile;
03775546 mixing bowl; 03838899 oboe; 03854065 organ; 03888605 parallel bars; 03908618 pencil box;
03924679 photocopier; 03980874 poncho; 03998194 prayer rug; 04067472 reel; 04146614 school bus;
04149813 scoreboard; 04243546 slot; 04251144 snorkel; 04258138 solar dish; 04275548 spider web;
04296562 stage; 04389033 tank; 04418357 theater curtain; 04435653 tile roof; 04443257 tobacco shop;
04509417 unicycle; 04515003 upright; 04522168 vase; 04596742 wok; 04604644 worm fence;
04612504 yawl; 06794110 street sign; 07584110 consomme; 07613480 trifle; 07697537 hotdog;
07747607 orange; 09246464 cliff; 09256479 coral reef; 13054560 bolete; 13133613 ear
"""
WORDNET: dict[str, str] = dict(entry.strip().split(" ", 1) for entry in _TABLE.split(";"))
"""The first name of each of the 100 classes of mini-ImageNet, by its number (`n04522168` is `vase`)."""


def readable(names: Sequence[str]) -> list[str]:
    """`n04522168` as `vase`, `001.Black_footed_Albatross` as `Black footed Albatross`, others as they are.

    Names that would be the same stay as they were.
    """
    found = []
    for name in names:
        bird = re.fullmatch(r"\d{3}\.(.+)", name)
        found.append(bird[1].replace("_", " ") if bird else WORDNET.get(name.removeprefix("n"), name))
    return found if len(set(found)) == len(names) else list(names)
