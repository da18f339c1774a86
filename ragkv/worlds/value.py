"""Values that are not names, such as professions, instruments and materials. Both splits have the same ones."""

from __future__ import annotations

from ragkv.worlds.name import listed

__all__ = ["INSTRUMENTS", "KINDS", "KNOWN_FOR", "MATERIALS", "PROFESSIONS"]

PROFESSIONS = listed(
    "chemist|engineer|architect|geologist|physician|clockmaker|botanist|lawyer|teacher|carpenter|pilot|surveyor|"
    "economist|historian|mathematician|glassblower|baker|journalist|translator|biologist|blacksmith|librarian|"
    "astronomer|tailor|sailor|nurse|potter|veterinarian|photographer|printer|dentist|welder",
    "|",
)
INSTRUMENTS = listed(
    "cello|violin|flute|piano|accordion|trumpet|harp|oboe|guitar|clarinet|mandolin|banjo|drums|organ|viola|bassoon|"
    "saxophone|lute|trombone|zither",
    "|",
)
KINDS = listed(
    "folding bicycle|desk lamp|water pump|camping stove|pocket radio|coffee grinder|sewing machine|rain coat|"
    "fishing reel|hand drill|wall clock|microscope|garden tractor|electric kettle|snow blower|bread oven|"
    "pressure gauge|sailing boat|reading chair|typewriter|hearing aid|milk separator|weather station|cable winch|"
    "tea set|paper cutter|road roller|wheel loader|air compressor|film camera|cargo trailer|barometer",
    "|",
)
MATERIALS = listed(
    "brass|oak|aluminium|copper|bamboo|steel|leather|walnut|cork|glass|titanium|cast iron|ash wood|bronze|linen|"
    "carbon fibre|pine|zinc|stoneware|maple",
    "|",
)
KNOWN_FOR = listed(
    "smoked trout|iron bridge|lavender fields|salt mines|blue pottery|stone lighthouse|cherry orchards|paper mills|"
    "winter market|old observatory|apple cider|wool carpets|glass museum|goat cheese|clock tower|thermal baths|"
    "honey cakes|botanical garden|puppet theatre|copper roofs|walnut bread|ferry festival|rose gardens|silk weavers|"
    "slate quarries|chess tournament|horse fair|pepper sauce|wooden churches|kite festival",
    "|",
)
