"""Parameter counts of every published ViT, to the digit.

The numbers were computed from the reference code, vision_transformer and
big_vision, not from this package.
"""

import functools

import jax
import numpy as np
import pytest

from vit_jax.models import vit

# vision_transformer: class token with a position. Each row holds 0, 1000 and
# 21843 classes: at 224 px, with a tanh representation of size D, at 384 px.
VISION_TRANSFORMER = {
  "Ti/16": (
    (5_524_416, 5_717_416, 9_740_115),
    (5_561_472, 5_754_472, 9_777_171),
    (5_597_376, 5_790_376, 9_813_075),
  ),
  "S/32": (
    (22_493_952, 22_878_952, 30_903_507),
    (22_641_792, 23_026_792, 31_051_347),
    (22_530_432, 22_915_432, 30_939_987),
  ),
  "S/16": (
    (21_665_664, 22_050_664, 30_075_219),
    (21_813_504, 22_198_504, 30_223_059),
    (21_811_584, 22_196_584, 30_221_139),
  ),
  "B/32": (
    (87_455_232, 88_224_232, 104_252_499),
    (88_045_824, 88_814_824, 104_843_091),
    (87_528_192, 88_297_192, 104_325_459),
  ),
  "B/16": (
    (85_798_656, 86_567_656, 102_595_923),
    (86_389_248, 87_158_248, 103_186_515),
    (86_090_496, 86_859_496, 102_887_763),
  ),
  "B/8": (
    (85_807_872, 86_576_872, 102_605_139),
    (86_398_464, 87_167_464, 103_195_731),
    (86_975_232, 87_744_232, 103_772_499),
  ),
  "L/32": (
    (305_510_400, 306_535_400, 327_899_475),
    (306_560_000, 307_585_000, 328_949_075),
    (305_607_680, 306_632_680, 327_996_755),
  ),
  "L/16": (
    (303_301_632, 304_326_632, 325_690_707),
    (304_351_232, 305_376_232, 326_740_307),
    (303_690_752, 304_715_752, 326_079_827),
  ),
  "H/14": (
    (630_764_800, 632_045_800, 658_745_683),
    (632_404_480, 633_685_480, 660_385_363),
    (631_370_240, 632_651_240, 659_351_123),
  ),
}

# big_vision at 224 px; its class token has no position. The rows hold gap with
# 0, 1000 and 21843 classes; then, with 1000 classes, gap sincos2d without and
# with a representation of size D; cls and map.
BIG_VISION = {
  "mu/16": ((43_648, 76_648, 764_467), (70_376, 71_432), (76_680, 89_320)),
  "Ti/16": (
    (5_524_032, 5_717_032, 9_739_731),
    (5_679_400, 5_716_456),
    (5_717_224, 6_161_704),
  ),
  "S/32": (
    (22_493_184, 22_878_184, 30_902_739),
    (22_859_368, 23_007_208),
    (22_878_568, 24_652_264),
  ),
  "S/16": (
    (21_664_896, 22_049_896, 30_074_451),
    (21_974_632, 22_122_472),
    (22_050_280, 23_823_976),
  ),
  "S/14": (
    (21_618_816, 22_003_816, 30_028_371),
    (21_905_512, 22_053_352),
    (22_004_200, 23_777_896),
  ),
  "M/16": (
    (38_323_712, 38_836_712, 49_529_171),
    (38_736_360, 38_999_016),
    (38_837_224, 41_988_584),
  ),
  "B/32": (
    (87_453_696, 88_222_696, 104_250_963),
    (88_185_064, 88_775_656),
    (88_223_464, 95_309_800),
  ),
  "B/16": (
    (85_797_120, 86_566_120, 102_594_387),
    (86_415_592, 87_006_184),
    (86_566_888, 93_653_224),
  ),
  "B/8": (
    (85_806_336, 86_575_336, 102_603_603),
    (85_973_224, 86_563_816),
    (86_576_104, 93_662_440),
  ),
  "L/32": (
    (305_508_352, 306_533_352, 327_897_427),
    (306_483_176, 307_532_776),
    (306_534_376, 319_128_552),
  ),
  "L/16": (
    (303_299_584, 304_324_584, 325_688_659),
    (304_123_880, 305_173_480),
    (304_325_608, 316_919_784),
  ),
  "L/14": (
    (303_176_704, 304_201_704, 325_565_779),
    (303_939_560, 304_989_160),
    (304_202_728, 316_796_904),
  ),
  "So400m/14": (
    (412_442_352, 413_595_352, 437_627_331),
    (413_300_440, 414_628_696),
    (413_596_504, 428_833_704),
  ),
  "H/14": (
    (630_762_240, 632_043_240, 658_743_123),
    (631_715_560, 633_355_240),
    (632_044_520, 651_719_400),
  ),
  "H/16": (
    (630_915_840, 632_196_840, 658_896_723),
    (631_945_960, 633_585_640),
    (632_198_120, 651_873_000),
  ),
  "g/14": (
    (1_011_199_616, 1_012_608_616, 1_041_976_403),
    (1_012_248_168, 1_014_232_040),
    (1_012_610_024, 1_037_857_384),
  ),
  "G/14": (
    (1_842_772_352, 1_844_437_352, 1_879_140_947),
    (1_844_011_368, 1_846_781_928),
    (1_844_439_016, 1_882_797_416),
  ),
  "e/14": (
    (3_805_417_728, 3_807_210_728, 3_844_582_227),
    (3_806_751_976, 3_809_965_032),
    (3_807_212_520, 3_875_135_720),
  ),
  "g-opt/16": (
    (1_134_746_112, 1_136_283_112, 1_168_318_803),
    (1_135_982_056, 1_138_342_888),
    (1_136_284_648, 1_164_613_096),
  ),
}

# Each name once is enough from day to day.
DAILY = ("Ti/16", "S/32", "B/16", "L/16", "H/14")
DAILY_ALSO = ("mu/16", "M/16", "So400m/14", "g/14", "g-opt/16", "G/14", "e/14")


def each_row(table, daily):
  marks = {v: () if v in daily else pytest.mark.slow for v in table}
  rows = [pytest.param(v, marks=m) for v, m in marks.items()]
  return pytest.mark.parametrize("variant", rows)


def count(variant, *, size=224, **fields):
  model = vit.ViT(**vit.sizes(variant), **fields)
  image = jax.ShapeDtypeStruct((1, size, size, 3), np.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  return sum(x.size for x in jax.tree.leaves(params))


def test_the_tables_hold_every_variant():
  tested = {v.split("/")[0] for v in VISION_TRANSFORMER | BIG_VISION}
  assert set(vit.VARIANTS) - tested == {"G-opt"}  # No published count.


@each_row(VISION_TRANSFORMER, DAILY)
def test_count_equals_vision_transformer(variant):
  large = 384 if variant != "H/14" else 378  # The reference crops the rest.
  rep = vit.sizes(variant)["width"]
  counts = tuple(
    tuple(
      count(variant, size=size, num_classes=k, representation_size=r)
      for k in (0, 1000, 21843)
    )
    for size, r in ((224, None), (224, rep), (large, None))
  )
  assert counts == VISION_TRANSFORMER[variant]


@each_row(BIG_VISION, DAILY_ALSO)
def test_count_equals_big_vision(variant):
  gap = functools.partial(count, variant, pool="gap")
  sincos = functools.partial(gap, num_classes=1000, posemb="sincos2d")
  rep = vit.sizes(variant)["width"]
  counts = (
    tuple(gap(num_classes=k) for k in (0, 1000, 21843)),
    (sincos(), sincos(representation_size=rep)),
    (
      count(variant, num_classes=1000, pool="cls", cls_posemb=False),
      count(variant, num_classes=1000, pool="map"),
    ),
  )
  assert counts == BIG_VISION[variant]
